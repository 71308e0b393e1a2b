"""What a room costs, in figures that do not depend on the machine: calls of our own code, and work for the collector.

Throughput is Python's; a third of it was once lost bit by bit, and no test saw it. Seconds differ from machine to
machine and from hour to hour; the calls that a room takes do not.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvgrpc
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.transfer import KVPoll
from kvgrpc.transfer.protocol.types import DecodeEntry
from tests.support.rank_host import AUX_ROWS, RankHost
from tests.support.transfer_peers import receiver_of, sender_of
from tests.support.waiting import wait_until

OURS = str(Path(kvgrpc.__file__).parent)
ROOMS = 256
NUMBERS = iter(range(80_000_000, 90_000_000, ROOMS))
# Measured (228, 55), and a seventh more: a busy machine takes more frames for as many rooms. Whoever needs more of them
# measures control.throughput first, before and after.
CALLS_ON_THE_LOOP, CALLS_OF_THE_ENGINES = 260, 80
# Of both sides together: the two handles and prefill's record. A table of decode's parts comes to them.
COLLECTED_OBJECTS = 3


@pytest.fixture(scope="module", autouse=True)
def warm(prefill: RankHost, decode: RankHost) -> None:
    """The session stands, and what is made once is there."""
    _hand_over(prefill, decode)


def test_a_room_takes_no_more_calls_than_it_did(prefill: RankHost, decode: RankHost) -> None:
    counter = _Calls()
    with counter.counting():
        _hand_over(prefill, decode)
    of_loop, of_engines = counter.loop / ROOMS, counter.engines / ROOMS
    print(f"calls of a room: {of_loop:.0f} on the loop, {of_engines:.0f} on engine threads")
    assert of_loop <= CALLS_ON_THE_LOOP
    assert of_engines <= CALLS_OF_THE_ENGINES


def test_a_room_leaves_nothing_to_the_garbage_collector(prefill: RankHost, decode: RankHost) -> None:
    """A record and a handle that hold each other would be there until a full collection, thousands of them."""
    gc.collect()
    gc.disable()
    try:
        _hand_over(prefill, decode)
        wait_until(lambda: not decode.rank.transfer.open_rooms())
        left = _unreachable()
    finally:
        gc.enable()
    assert left < ROOMS / 10  # some are of grpc.aio, a few for each frame


def test_rooms_that_are_over_leave_nothing_in_memory(prefill: RankHost, decode: RankHost) -> None:
    """The garbage collector does not look at most records, so that none may be part of a ring when it is over."""
    for _ in range(2):  # the last failures are kept, 256 of them, of which some take more memory than others
        _give_up(prefill, decode)
    before = _blocks(prefill, decode)
    for _ in range(4):
        _hand_over(prefill, decode)
        _give_up(prefill, decode)
    grown = (_blocks(prefill, decode) - before) / (8 * ROOMS)
    print(f"blocks of a room that is over: {grown:.2f}")
    assert grown < 5  # a ring is a room with all that it has, 32 pieces


def test_an_open_room_is_few_objects_to_the_garbage_collector(prefill: RankHost, decode: RankHost) -> None:
    """It looks at all of them again and again while rooms open: with 17 a room that took a third of the throughput."""
    first, bootstrap = next(NUMBERS), prefill.rank.address
    wait_until(lambda: not prefill.rank.transfer.core.rooms)  # those of the tests before
    before = _collected()
    senders = [sender_of(prefill, room) for room in range(first, first + ROOMS)]
    receivers = [receiver_of(decode, bootstrap, room) for room in range(first, first + ROOMS)]
    wait_until(lambda: all(receiver.prefill_ready for receiver in receivers))
    objects = (_collected() - before) / ROOMS
    for end in (*receivers, *senders):
        end.close()
    assert objects < COLLECTED_OBJECTS + 0.5, objects


def _collected() -> int:
    """How many records of rooms the collector looks at; the entries of a frame live until the next one is written."""
    gc.collect()
    kinds = [type(each) for each in gc.get_objects()]
    return sum(str(kind.__module__).startswith("kvgrpc.transfer") and kind is not DecodeEntry for kind in kinds)


def _unreachable() -> int:
    """How many objects only a collection frees, between two turns of the loop: what runs is reachable."""
    return LoopThread.shared().run(_collect(), 30.0)


async def _collect() -> int:
    return gc.collect()


def _hand_over(prefill: RankHost, decode: RankHost) -> None:
    """ROOMS rooms of one page at once."""
    first, bootstrap = next(NUMBERS), prefill.rank.address
    rooms = range(first, first + ROOMS)
    senders = [sender_of(prefill, room) for room in rooms]
    receivers = [receiver_of(decode, bootstrap, room) for room in rooms]
    wait_until(lambda: all(receiver.prefill_ready for receiver in receivers))  # so each room takes the same way
    for number, receiver in enumerate(receivers):
        receiver.init([number], aux_index=number % AUX_ROWS)
    for number, sender in enumerate(senders):
        sender.init(1, aux_index=number % AUX_ROWS)
        sender.send([number])
    for end in (*receivers, *senders):
        wait_until(lambda end=end: end.ended)  # type: ignore[misc]
        assert end.poll() is KVPoll.Success, end.failure
        end.close()


def _give_up(prefill: RankHost, decode: RankHost) -> None:
    """ROOMS rooms that end before anything is written: pages that wait refer to their sender, decode's are wrong."""
    first = next(NUMBERS)
    senders = [sender_of(prefill, room) for room in range(first, first + ROOMS)]
    receivers = [receiver_of(decode, prefill.rank.address, room) for room in range(first, first + ROOMS)]
    for number, (sender, receiver) in enumerate(zip(senders, receivers, strict=True)):
        sender.init(2, aux_index=0)
        sender.send([number], wait=sender.close)
        if number % 2:
            receiver.init([1, 1], aux_index=0)
        else:
            sender.abort("the client has gone")
    for end in (*senders, *receivers):
        wait_until(lambda end=end: end.ended)  # type: ignore[misc]
        end.close()


def _blocks(prefill: RankHost, decode: RankHost) -> int:
    """How many pieces of memory Python uses, once nothing is known of any room."""
    for host in (prefill, decode):
        wait_until(lambda host=host: not host.rank.transfer.core.rooms)  # type: ignore[misc]
    gc.collect()
    return sys.getallocatedblocks()


# What this thread does while it waits.
_LOOKS = (
    *("ended", "poll", "give_way", "look", "_is_believed", "prefill_ready", "_rooms_at_once"),
    *("_work_waits", "work_waits", "_progress", "turns", "busy"),
)


class _Calls:
    """Calls of kvgrpc's functions, on the loop thread and on this one."""

    def __init__(self) -> None:
        self.loop = self.engines = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._profile_loop(self._on_loop)
        sys.setprofile(self._on_engine)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._profile_loop(None)

    def _profile_loop(self, profile: Callable[..., None] | None) -> None:
        done = threading.Event()

        def switch() -> None:
            sys.setprofile(profile)
            done.set()

        LoopThread.shared().loop.call_soon_threadsafe(switch)
        assert done.wait(10.0)

    def _on_loop(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            self.loop += 1

    def _on_engine(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_name
        if event == "call" and frame.f_code.co_filename.startswith(OURS) and name not in _LOOKS:
            self.engines += 1
