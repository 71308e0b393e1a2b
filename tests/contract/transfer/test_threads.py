"""Engine threads, the loop and the transfer thread at once, in real ranks: what the simulation checks of the cores.

Each end of each room is driven by a script that one seed makes: pages given early or late, chunks in any order, aborts,
waits, and engines that look without pause, compute or sleep in between. Threads change every 20 us, so that they meet
where they seldom would. However they meet: no page is written after it came back, no end changes, nothing stays open.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvgrpc.transfer import KVPoll
from tests.support.rank_host import AUX_ROWS, PAGES, RankHost
from tests.support.transfer_peers import core_of, receiver_of, sender_of
from tests.support.waiting import wait_until

THREADS = 3  # on each side
OPEN_AT_ONCE = 8
POISON = 0xEE
SECONDS = 60.0
NUMBERS = iter(range(60_000_000, 70_000_000, 10_000))


@dataclass
class Script:
    """Of one room; ``disturbed``: one end gives up on purpose."""

    room: int
    source: list[int]
    early: bool
    aux_row: int = 0
    pages: list[int] = field(default_factory=list)
    chunks: list[slice] = field(default_factory=list)
    waits: bool = False
    decode_aborts: int | None = None
    prefill_aborts: int | None = None

    @property
    def disturbed(self) -> bool:
        return self.decode_aborts is not None or self.prefill_aborts is not None


class Stress:
    """``wrong`` is what broke; ``decode_over``: rooms whose receiver has ended, so that no sender waits for it."""

    def __init__(self, prefill: RankHost, decode: RankHost, seed: int, rooms: int) -> None:
        self.prefill, self.decode = prefill, decode
        self.bootstrap = f"{prefill.rank.address}/{prefill.rank.ref.rank.engine}"
        self.wrong: list[str] = []
        self.ends: dict[tuple[str, int], KVPoll] = {}
        self.decode_over: set[int] = set()
        self.deadline = time.monotonic() + SECONDS
        first, chance = next(NUMBERS), random.Random(seed)
        self.scripts = [_script(chance, first + number) for number in range(rooms)]
        decode.memory[:] = POISON

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._guarded, args=(drive, number), name=f"{drive.__name__}-{number}")
            for drive in (self._decode_engine, self._prefill_engine)
            for number in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS + 10)
        assert not self.wrong, self.wrong[:5]
        for script in self.scripts:
            ends = self.ends["decode", script.room], self.ends["prefill", script.room]
            assert script.disturbed or ends == (KVPoll.Success, KVPoll.Success), (script, ends)
            # An abort that comes after the last write is the sender's own word; the bytes are there all the same.
            late = script.prefill_aborts is not None
            assert ends[0] is not KVPoll.Success or ends[1] is KVPoll.Success or late, (script, ends)

    def _guarded(self, drive: Callable[[int], None], number: int) -> None:
        try:
            drive(number)
        except BaseException as error:
            self.wrong.append(f"{drive.__name__}: {type(error).__name__}: {error}")

    def _decode_engine(self, number: int) -> None:
        chance = random.Random(number)
        free = deque(range(number * (PAGES // THREADS), (number + 1) * (PAGES // THREADS)))
        rows = deque(range(number * (AUX_ROWS // THREADS), (number + 1) * (AUX_ROWS // THREADS)))
        waiting = deque(self.scripts[number::THREADS])
        running: list[_Receiving] = []
        while waiting or running:
            self._check_time([f"receiver {each.script.room} {each.handle.poll().name}" for each in running])
            while waiting and len(running) < OPEN_AT_ONCE and len(free) >= len(waiting[0].source) and rows:
                script = waiting.popleft()
                script.pages = [free.popleft() for _ in script.source]
                script.aux_row = rows.popleft()
                running.append(_Receiving(self, script))
            for each in running:
                each.step()
            for each in [each for each in running if each.over]:
                running.remove(each)
                self.ends["decode", each.script.room] = each.handle.poll()
                free.extend(each.script.pages)
                rows.append(each.script.aux_row)
            _compute_or_sleep(chance)

    def _prefill_engine(self, number: int) -> None:
        chance = random.Random(1000 + number)
        waiting = deque(self.scripts[number::THREADS])
        running: list[_Sending] = []
        while waiting or running:
            self._check_time([f"sender {each.script.room} {each.handle.poll().name}" for each in running])
            while waiting and len(running) < 2 * OPEN_AT_ONCE:
                running.append(_Sending(self, waiting.popleft()))
            for each in running:
                each.step()
            for each in [each for each in running if each.over]:
                running.remove(each)
                self.ends["prefill", each.script.room] = each.handle.poll()
            _compute_or_sleep(chance)

    def _check_time(self, what: list[str]) -> None:
        assert not self.wrong, "another thread failed"
        assert time.monotonic() < self.deadline, f"still open: {what[:4]}"


class _End:
    """Looks at one handle as an engine does; what it says only goes on, and its end stays."""

    def __init__(self, handle: Any, script: Script) -> None:
        self.handle = handle
        self.script = script
        self.steps = 0
        self._last: KVPoll = handle.poll()

    def look(self) -> KVPoll:
        before = self._last
        now: KVPoll = self.handle.poll()
        ended = before in (KVPoll.Failed, KVPoll.Success)
        assert now is before or (not ended and (now is KVPoll.Failed or now > before)), (self.script, before, now)
        self._last = now
        self.steps += 1
        return now

    def give_up_at(self, step: int | None) -> None:
        if step is not None and self.steps >= step and not self.handle.ended:
            self.handle.abort()
            end = self.handle.poll()
            # What arrived between the look and the abort is a success, whose bytes are looked at, and stays one.
            assert end in (KVPoll.Failed, KVPoll.Success) and self.handle.poll() is end


class _Receiving(_End):
    def __init__(self, stress: Stress, script: Script) -> None:
        self.stress = stress
        self.initialised = self.checked = self.over = False
        self._check_untouched(script)
        super().__init__(receiver_of(stress.decode, stress.bootstrap, script.room), script)
        if script.early:
            self._init()

    def step(self) -> None:
        poll, script = self.look(), self.script
        if poll is KVPoll.WaitingForInput and not self.initialised:
            self._init()
        self.give_up_at(script.decode_aborts)
        if self.handle.ended and not self.checked:
            self.checked = True
            if self.handle.poll() is KVPoll.Success:
                self._check_bytes()
            else:
                assert script.disturbed, (script, self.handle.failure)
            self.handle.close()
            self.stress.decode_over.add(script.room)
        if self.checked and self.handle.release_safe:
            self.over = True
            self.stress.decode.memory[:, script.pages] = POISON

    def _init(self) -> None:
        self.initialised = True
        self.handle.init(np.array(self.script.pages, np.int32), self.script.aux_row)

    def _check_bytes(self) -> None:
        script, ours, theirs = self.script, self.stress.decode, self.stress.prefill
        assert (ours.memory[:, script.pages] == theirs.memory[:, script.source]).all(), f"wrong bytes: {script}"
        assert ours.aux_row(script.aux_row) == theirs.aux_row(script.room % AUX_ROWS), f"wrong aux: {script}"

    def _check_untouched(self, script: Script) -> None:
        """Since they came back nobody wrote to them."""
        assert (self.stress.decode.memory[:, script.pages] == POISON).all(), f"written after it came back: {script}"


class _Sending(_End):
    def __init__(self, stress: Stress, script: Script) -> None:
        self.stress = stress
        self.left = deque(script.chunks)
        super().__init__(sender_of(stress.prefill, script.room), script)
        if script.early:
            self.handle.init(len(script.source), script.room % AUX_ROWS)
            self._send()

    @property
    def over(self) -> bool:
        return self.handle.ended and bool(self.handle.release_safe)

    def step(self) -> None:
        poll, script = self.look(), self.script
        if poll is KVPoll.WaitingForInput and not script.early and len(self.left) == len(script.chunks):
            self.handle.init(len(script.source), script.room % AUX_ROWS)
        if poll in (KVPoll.WaitingForInput, KVPoll.Transferring):
            self._send()
        self.give_up_at(script.prefill_aborts)
        if script.room in self.stress.decode_over and script.disturbed:
            self.handle.abort()  # a receiver that gave up before it named the room leaves nobody to wait for

    def _send(self) -> None:
        if self.left:
            part = self.left.popleft()
            wait = (lambda: time.sleep(0.000_5)) if self.script.waits else None  # pages that are computed still
            pages = np.array(self.script.source[part], np.int32)
            self.handle.send(pages, part, wait=wait)


def _script(chance: random.Random, room: int) -> Script:
    count = chance.choice((1, 1, 1, 2, 3, 8, 20))
    script = Script(room, chance.sample(range(PAGES), count), early=chance.random() < 0.5)
    cuts = sorted({0, count, *(chance.randrange(count) for _ in range(chance.randrange(3)))})
    script.chunks = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
    chance.shuffle(script.chunks)
    script.waits = chance.random() < 0.1
    if chance.random() < 0.25:
        script.decode_aborts = chance.randrange(20)
    if chance.random() < 0.1:
        script.prefill_aborts = chance.randrange(6)
    return script


def _compute_or_sleep(chance: random.Random) -> None:
    """Between two looks."""
    kind = chance.random()
    if kind < 0.3:
        time.sleep(0.000_05)  # an engine's nap
    elif kind < 0.6:
        sum(range(chance.randrange(5_000)))


@pytest.fixture
def hurried() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.000_02)
    yield
    sys.setswitchinterval(before)


def everything_is_over(prefill: RankHost, decode: RankHost) -> None:
    """Nothing is open, held, counted or remembered without need."""
    wait_until(lambda: not core_of(decode).rooms and not decode.rank.transfer.held_pages, 30)
    core = core_of(prefill)
    wait_until(lambda: not core.open_writes and all(record.ended for record in list(core.rooms.values())), 30)
    assert all(pair.unclaimed == 0 for pair in list(core.pairs.values()))  # the loop thread may change it meanwhile
    assert prefill.rank.healthy and decode.rank.healthy
    assert prefill.rank.transfer.errors == decode.rank.transfer.errors == 0


@pytest.fixture(scope="module")
def slow() -> Iterator[RankHost]:
    """A prefill of which every other write is some milliseconds late: pages must wait for it."""
    host = RankHost("S", "PREFILL", {"registry": "embedded", "slow_seconds": dict.fromkeys(range(0, 100_000, 2), 0.02)})
    host.fill(2)
    yield host
    assert host.rank.transfer.errors == 0
    host.close(1.0)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("which", ["prefill", "slow"])
def test_however_threads_meet_no_room_is_lost_and_no_page_is_foreign(
    which: str, decode: RankHost, request: pytest.FixtureRequest
) -> None:
    prefill: RankHost = request.getfixturevalue(which)
    Stress(prefill, decode, seed=1, rooms=150).run()
    everything_is_over(prefill, decode)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("hurried")
def test_however_threads_meet_in_ten_thousand_rooms(prefill: RankHost, slow: RankHost, decode: RankHost) -> None:
    ended: Counter[str] = Counter()
    for seed in range(100, 125):
        for host in (prefill, slow):
            stress = Stress(host, decode, seed, rooms=200)
            stress.run()
            everything_is_over(host, decode)
            ended.update(f"{side} {poll.name}" for (side, _), poll in stress.ends.items())
    print(dict(ended))
    assert ended.total() == 2 * 10_000, "each room ends on both sides"
    assert min(ended.values()) > 500, "cancels from either side, and rooms that nobody cancels"
