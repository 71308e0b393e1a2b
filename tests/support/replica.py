"""A replica of three ranks, each in a process of its own, for tests that kill and stop them."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path
from typing import Any

from tests.support import agreement_rank
from tests.support.agreement_rank import AGREEMENT_SECONDS, RANKS
from tests.support.quick_start import Program
from tests.support.waiting import wait_until


class RankProcess:
    """A rank of a replica that can be killed, stopped and started again under its own address."""

    def __init__(self, tp: int, folder: Path, leader: str, shape: str) -> None:
        self.tp = tp
        self._shape = shape
        self._folder = folder
        self._leader = leader
        self.address = ""
        self.start()

    def start(self) -> None:
        words = str(self.tp), str(self._folder), self.address or "127.0.0.1:0", self._leader, self._shape
        self.process = Program(agreement_rank.main, *words)
        self.began = time.monotonic()

    def started(self) -> str:
        self.address = str(self.answer()["address"])
        return self.address

    def tell(self, do: str, **order: object) -> None:
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, f"rank {self.tp} ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **order: object) -> dict[str, Any]:
        self.tell(do, **order)
        return self.answer()

    def in_state(self, name: str, *states: str) -> None:
        wait_until(lambda: self.ask("state", name=name)["state"] in states)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20.0)
        for pipe in (self.process.stdin, self.process.stdout):
            # What was told and never read is lost with the process.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Replica:
    """Three processes. Rank 0 leads; rank 2 is the one that suffers. ``shape``: "mla": they hold the same pages."""

    def __init__(self, folder: Path, shape: str = "mha") -> None:
        self.leader = RankProcess(0, folder, "", shape)
        address = self.leader.started()
        self.ranks = [self.leader, *(RankProcess(tp, folder, address, shape) for tp in range(1, RANKS))]
        for rank in self.ranks[1:]:
            rank.started()
        self.all_there()

    def all_there(self) -> None:
        wait_until(lambda: all(rank.ask("info")["live"] == RANKS for rank in self.ranks))

    def store(self, first: int, pages: int) -> None:
        for rank in self.ranks:
            assert rank.ask("store", first=first, pages=pages) == {"state": "DONE"}

    def ends(
        self, name: str, ranks: list[RankProcess], within: float = AGREEMENT_SECONDS
    ) -> list[tuple[str, str, int]]:
        """How it ended at these ranks, each of them in its time and some; nothing is left."""
        for rank in ranks:
            rank.in_state(name, "AGREEING", "TRANSFERRING", "ENDING", "DONE", "DECLINED", "FAILED", "PARTIAL")
            rank.tell("wait", name=name)
        answers = [rank.answer() for rank in ranks]
        for rank, answer in zip(ranks, answers, strict=True):
            assert answer["waited"] < within + 8.0, f"rank {rank.tp} hung: {answer}"
            info = rank.ask("info")
            assert (info["open"], info["reserved"], info["occupied"], info["healthy"]) == (0, 0, 0, True)
        waited = ", ".join(f"rank {rank.tp} {each['waited']:.2f} s" for rank, each in zip(ranks, answers, strict=True))
        print(f"\n{answers[0]['state']} {answers[0]['stop']} with {answers[0]['completed']} pages after {waited}")
        return [(each["state"], each["stop"], each["completed"]) for each in answers]

    def works(self, first: int, pages: int) -> None:
        """The next operation brings all of it, with the right bytes, at every rank."""
        self.all_there()
        name = self.leader.ask("start", first=first, pages=pages)["name"]
        assert self.ends(name, self.ranks) == [("DONE", "NONE", pages)] * RANKS

    def close(self) -> None:
        for rank in self.ranks:
            rank.process.send_signal(signal.SIGCONT)
            rank.kill()
