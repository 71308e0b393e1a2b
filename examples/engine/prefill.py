"""The prefill engine. Reads one JSON object a line: {"room": 1, "prompt": [5, 7, 9], "seconds": 0}, a value a page."""

from __future__ import annotations

import json
import sys
import time

from memory import Memory

from kvgrpc.server import KVPoll, KVSender, RankConfig, Role, open_prefill

FIRST_TOKEN = 1000


def main() -> None:
    memory = Memory()
    config = RankConfig(
        engine="toy-prefill", role=Role.PREFILL, pools=(memory.pool,), aux=memory.aux_buffers, registry="embedded"
    )
    with open_prefill(config) as rank:
        print(json.dumps({"address": rank.address}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            room, prompt = request["room"], request["prompt"]
            sender = KVSender(rank.transfer, room=room)
            row = room % len(memory.aux)
            # What decode holds already need not be computed, let alone sent: its pages say so.
            sender.wait(10.0, until=KVPoll.WaitingForInput)
            known = sender.decode_prefix_pages or 0
            sender.init(len(prompt) - known, aux_index=row)
            pages = []
            for position in range(known, len(prompt)):
                time.sleep(request["seconds"])
                if sender.ended:  # decode gave up
                    break
                page = (room * 8 + position) % 64
                memory.compute(page, prompt[position])
                memory.aux[row] = FIRST_TOKEN + sum(prompt)
                sender.send([page])
                pages.append(page)
            end = sender.wait(10.0)
            why = "" if sender.failure is None else sender.failure.reason.name
            print(json.dumps({"room": room, "end": end.name, "why": why, "sent": len(pages)}), flush=True)
            sender.close()


if __name__ == "__main__":
    main()
