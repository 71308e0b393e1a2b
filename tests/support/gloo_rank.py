"""One rank of a gloo group in a process of its own: ``python -m tests.support.gloo_rank RANK SIZE FILE ORDER``.

Begins the operations of ORDER (names with pages, "one=5,two=3"), prints what was decided, and reads "die" or "close".
"""

from __future__ import annotations

import json
import sys
import threading
import time

import torch.distributed as dist

from kvgrpc.prefetch.agreement.gloo import GlooAgreement
from kvgrpc.prefetch.protocol.votes import Decision, Stage, Vote

TIMEOUT = 3.0


def main(rank: int, size: int, file: str, order: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    agreement = GlooAgreement(list(range(size)), timeout=TIMEOUT)
    begin(agreement, order)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "begin":
            begin(agreement, rest)
        elif word == "hang":
            time.sleep(60)  # the rank that hangs itself
        else:
            say("closed", agreement.close(10.0))
            return


def begin(agreement: GlooAgreement, order: str) -> None:
    for each in filter(None, order.split(",")):
        name, _, pages = each.partition("=")
        began = time.monotonic()

        def decided(decision: Decision, began: float = began) -> None:
            say(decision.key, [decision.pages, decision.stop.name, time.monotonic() - began])

        agreement.vote(Vote(name, Stage.HITS, int(pages)), TIMEOUT, decided)
        time.sleep(0.02)  # the interval between votes


_lock = threading.Lock()


def say(name: str, what: object) -> None:
    with _lock:
        print(json.dumps([name, what]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
