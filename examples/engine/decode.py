"""The decode engine. Reads {"room": 1, "prefill": ADDRESS, "prompt": [5, 7, 9], "held": 0, "give_up": false} a line."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from typing import Any

from memory import Memory

from kvgrpc.server import DecodeRuntime, KVPoll, KVReceiver, Rank, RankConfig, Role, open_decode


def main() -> None:
    memory = Memory()
    config = RankConfig(engine="toy-decode", role=Role.DECODE, pools=(memory.pool,), aux=memory.aux_buffers)
    with open_decode(config) as rank:
        print(json.dumps({"address": rank.address}), flush=True)
        for line in sys.stdin:
            print(json.dumps(receive(rank, memory, json.loads(line))), flush=True)


def receive(rank: Rank[DecodeRuntime], memory: Memory, request: dict[str, Any]) -> dict[str, Any]:
    """One request from its room to its first token."""
    room, prompt, held = request["room"], request["prompt"], request["held"]
    pages = [32 + position for position in range(len(prompt))]
    for position in range(held):  # as a prefix cache would have it
        memory.compute(pages[position], prompt[position])
    receiver = KVReceiver(rank.transfer, request["prefill"], room)
    row = room % len(memory.aux)
    receiver.init(pages[held:], aux_index=row, first_page=held)
    if request["give_up"]:
        receiver.abort("the client is gone")
    # An engine has many rooms and other things to wait for: one descriptor tells it that some room moved.
    moved = rank.transfer.fileno()
    while not receiver.ended:
        wait_for_news(moved)
    answer: dict[str, Any] = {"room": room, "end": receiver.poll().name, "why": ""}
    if receiver.poll() is KVPoll.Success:
        answer["right"] = all(memory.holds(page, value) for page, value in zip(pages, prompt, strict=True))
        answer["first_token"] = int(memory.aux[row])
    elif receiver.failure is not None:
        answer["why"] = receiver.failure.reason.name
        # Nobody else gets these pages before it is proven that prefill writes to them no more.
        while not receiver.release_safe:
            wait_for_news(moved)
    receiver.close()
    return answer


def wait_for_news(moved: int) -> None:
    """Until some room moved; a second at most."""
    select.select([moved], [], [], 1.0)
    with contextlib.suppress(BlockingIOError):  # none did
        os.eventfd_read(moved)


if __name__ == "__main__":
    main()
