"""Floods of HTTP/2 frames at both ends of a pair that hands over all the while: no room is lost, no byte is wrong."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvgrpc.transfer import KVPoll
from tests.support.hostile.floods import FLOODS
from tests.support.rank_host import RankProcess

# Of a room beside a flood, on a machine that others keep busy too: a server that a flood stops is away for longer.
ROOM_SECONDS = 30.0
ROOMS_AT_ONCE, PAGES_EACH, PAGES_SENT = 8, 4, 256
# The heads that they send are never freed by the library (docs/bounds.md): half a minute of them is gigabytes.
LONGEST_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class FloodPlan:
    """``seconds``: of all floods together."""

    seconds: float
    data_plane: str = "shm"
    seed: int = 1


@dataclass
class FloodResult:
    plan: FloodPlan
    rooms: Counter[str] = field(default_factory=Counter)
    """Handed over, by what flooded meanwhile."""
    longest: float = 0.0
    problems: list[str] = field(default_factory=list)


class FloodSoak:
    """One flood after the other comes from a process of its own, at the port of prefill and of decode."""

    def __init__(self, plan: FloodPlan) -> None:
        self._plan = plan
        self._numbers = itertools.count(1)
        self.result = FloodResult(plan)

    def run(self) -> FloodResult:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # in the processes from now on: a line for each large head
        prefill = RankProcess("P", "PREFILL", data_plane=self._plan.data_plane, registry="embedded")
        decode = RankProcess("D", "DECODE", data_plane=self._plan.data_plane, bootstrap_allow=("127.0.0.1",))
        try:
            prefill.opened()
            decode.opened()
            prefill.call("fill", self._plan.seed)
            for flood in FLOODS:
                with flooding(flood.__name__, prefill.address, decode.address):
                    self._hand_over_beside(flood.__name__, prefill, decode)
        except (AssertionError, OSError, EOFError, TimeoutError) as error:
            self.result.problems.append(f"the pair ended: {error}")
        finally:
            prefill.end()
            decode.end()
        return self.result

    def _hand_over_beside(self, flood: str, prefill: RankProcess, decode: RankProcess) -> None:
        """Some rooms at least, then as many as there is time for."""
        end = time.monotonic() + min(LONGEST_SECONDS, self._plan.seconds / len(FLOODS))
        while not self.result.rooms[flood] or time.monotonic() < end:
            began, rooms = time.monotonic(), list(itertools.islice(self._numbers, ROOMS_AT_ONCE))
            sent, received = [], []
            for room in rooms:
                first = (room * PAGES_EACH) % PAGES_SENT
                sent += (source := [*range(first, first + PAGES_EACH)])
                received += (target := [PAGES_SENT + (page + PAGES_EACH) % PAGES_SENT for page in source])
                decode.call("receive", room, f"{prefill.address}/P", target)
                prefill.call("send", room, source)
            ended = decode.call("wait", "receivers", rooms, [KVPoll.Success, KVPoll.Failed], ROOM_SECONDS)
            lost = {room: reason for room, (poll, reason, _) in ended.items() if poll != KVPoll.Success}
            self.result.problems += [f"beside {flood} room {room} ended with {reason}" for room, reason in lost.items()]
            if not lost and prefill.call("page_sums", sent) != decode.call("page_sums", received):
                self.result.problems.append(f"beside {flood} rooms {rooms} brought other bytes")
            self.result.rooms[flood] += len(rooms) - len(lost)
            self.result.longest = max(self.result.longest, time.monotonic() - began)


@contextlib.contextmanager
def flooding(name: str, *addresses: str) -> Iterator[None]:
    module = [sys.executable, "-m", "tests.support.hostile.floods", name, *addresses]
    with subprocess.Popen(module, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            if process.stdout.readline() != "floods\n":
                raise AssertionError(f"{name} does not flood")
            yield
        finally:
            process.kill()
