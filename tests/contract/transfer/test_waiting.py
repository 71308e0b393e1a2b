"""What engines wait for: one room, from a thread or an asyncio loop, or any room of a rank, by a file descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.transfer import KVPoll
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import receiver_of, sender_of
from tests.support.waiting import wait_until

ROOMS = iter(range(40_000_000, 50_000_000))
LONG = 15.0


def pair_of(prefill: RankHost, decode: RankHost) -> tuple[Any, Any]:
    room = next(ROOMS)
    return receiver_of(decode, f"{prefill.rank.address}/P", room), sender_of(prefill, room)


@contextlib.contextmanager
def loop_that_stands() -> Iterator[None]:
    """What shows meanwhile, the engine's thread has done itself."""
    standing, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        standing.set()
        go_on.wait(LONG)

    LoopThread.shared().loop.call_soon_threadsafe(stand)
    assert standing.wait(LONG)
    try:
        yield
    finally:
        go_on.set()


def test_a_receiver_whose_sessions_stand_may_allocate_when_it_is_made(prefill: RankHost, decode: RankHost) -> None:
    first, sender = pair_of(prefill, decode)
    assert first.wait(LONG, until=KVPoll.WaitingForInput) is KVPoll.WaitingForInput
    first.abort()
    sender.abort()
    with loop_that_stands():
        known = receiver_of(decode, f"{prefill.rank.address}/P", next(ROOMS))
        stranger = receiver_of(decode, f"{prefill.rank.address}/nobody", next(ROOMS))
        polls = known.poll(), stranger.poll()
    known.abort()
    stranger.abort()
    assert polls == (KVPoll.WaitingForInput, KVPoll.Bootstrapping)


def test_a_thread_waits_for_a_room_and_for_the_moment_to_allocate(prefill: RankHost, decode: RankHost) -> None:
    receiver, sender = pair_of(prefill, decode)
    assert receiver.wait(LONG, until=KVPoll.WaitingForInput) is KVPoll.WaitingForInput
    receiver.init([1, 2], 0)
    ended: list[KVPoll] = []
    waiting = [threading.Thread(target=lambda end=end: ended.append(end.wait(LONG))) for end in (receiver, sender)]
    for each in waiting:
        each.start()
    sender.init(2, 0)
    sender.send([3, 4])
    for each in waiting:
        each.join(LONG)
    assert ended == [KVPoll.Success] * 2
    assert receiver.pages_done == sender.pages_done == 2


def test_a_sender_that_was_initialised_early_knows_when_decode_has_named_its_pages(
    prefill: RankHost, decode: RankHost
) -> None:
    receiver, sender = pair_of(prefill, decode)
    sender.init(2, 0)
    assert sender.poll() is KVPoll.WaitingForInput and sender.decode_prefix_pages is None
    receiver.init([1, 2], 0, first_page=3)
    wait_until(lambda: sender.decode_prefix_pages == 3)
    receiver.abort()


def test_a_wait_ends_with_its_time_and_says_what_is_so(prefill: RankHost, decode: RankHost) -> None:
    receiver, sender = pair_of(prefill, decode)
    began = time.monotonic()
    assert receiver.wait(0.2) in (KVPoll.Bootstrapping, KVPoll.WaitingForInput)
    assert 0.2 <= time.monotonic() - began < LONG
    assert receiver.wait(0.0) is not KVPoll.Failed and not receiver._waiters
    receiver.abort()
    assert sender.wait(LONG) is KVPoll.Failed, "decode's abort is news of prefill's room"


@pytest.mark.parametrize("timeout", [math.inf, 1e308])
def test_a_wait_of_any_length_ends_with_its_room_and_raises_nothing(
    prefill: RankHost, decode: RankHost, timeout: float
) -> None:
    receiver, sender = pair_of(prefill, decode)
    abort = threading.Timer(0.1, receiver.abort)
    abort.start()
    assert receiver.wait(timeout) is KVPoll.Failed
    assert asyncio.run(sender.wait_async(timeout)) is KVPoll.Failed
    abort.join()


def test_a_wait_for_no_number_is_refused(prefill: RankHost, decode: RankHost) -> None:
    receiver, sender = pair_of(prefill, decode)
    with pytest.raises(InvalidRequest, match="timeout"):
        receiver.wait(math.nan)
    with pytest.raises(InvalidRequest, match="timeout"):
        asyncio.run(sender.wait_async(math.nan))
    assert receiver.wait(-math.inf) is not KVPoll.Failed
    receiver.abort()


def test_coroutines_wait_on_their_own_loop(prefill: RankHost, decode: RankHost) -> None:
    receiver, sender = pair_of(prefill, decode)

    async def hand_off() -> list[KVPoll]:
        assert await receiver.wait_async(0.01, until=KVPoll.Success) is not KVPoll.Success
        await receiver.wait_async(LONG, until=KVPoll.WaitingForInput)
        receiver.init([5], 1)
        sender.init(1, 1)
        sender.send([6])
        return list(await asyncio.gather(receiver.wait_async(LONG), sender.wait_async(LONG)))

    assert asyncio.run(hand_off()) == [KVPoll.Success, KVPoll.Success]


def test_a_loop_that_was_closed_while_it_waited_is_let_go_at_the_next_change(
    prefill: RankHost, decode: RankHost
) -> None:
    """Whoever waited there never comes to its end, and pages that a peer never gives back have no last change."""
    receiver = receiver_of(decode, f"{prefill.rank.address}/P", next(ROOMS))
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(receiver.wait_async(LONG))
    loop.run_until_complete(asyncio.sleep(0))
    left = asyncio.all_tasks(loop)
    loop.close()
    assert len(receiver._waiters) == 1
    sender = sender_of(prefill, receiver.room)
    wait_until(lambda: not receiver._waiters)
    assert receiver._handle.on_change != receiver._on_change, "what it listens to keeps it no more"
    assert receiver.wait(LONG, until=KVPoll.WaitingForInput) is KVPoll.WaitingForInput
    coroutine = waiting.get_coro()
    assert coroutine is not None
    coroutine.close()
    assert not receiver._waiters
    for each in left:
        each._log_destroy_pending = False  # type: ignore[attr-defined]
    receiver.abort()
    sender.abort()


def test_a_descriptor_is_readable_when_a_room_of_the_rank_changed(prefill: RankHost, decode: RankHost) -> None:
    fd = decode.rank.transfer.fileno()
    assert fd == decode.rank.transfer.fileno()
    with select.epoll() as poller:
        poller.register(fd, select.EPOLLIN)
        while poller.poll(0.2):
            os.eventfd_read(fd)
        receiver, sender = pair_of(prefill, decode)
        given, deadline = False, time.monotonic() + LONG
        while not receiver.ended and time.monotonic() < deadline:
            assert poller.poll(LONG), "nothing else wakes this loop"
            os.eventfd_read(fd)
            if receiver.poll() is KVPoll.WaitingForInput and not given:
                given = True
                receiver.init([7], 2)
                sender.init(1, 2)
                sender.send([8])
        assert receiver.poll() is KVPoll.Success


def test_pages_that_come_back_after_the_end_are_a_change_too(prefill: RankHost, decode: RankHost) -> None:
    receiver, sender = pair_of(prefill, decode)
    receiver.wait(LONG, until=KVPoll.WaitingForInput)
    receiver.init([9], 3)
    sender.wait(LONG, until=KVPoll.WaitingForInput)
    fd = decode.rank.transfer.fileno()
    receiver.abort()
    deadline = time.monotonic() + LONG
    with select.epoll() as poller:
        poller.register(fd, select.EPOLLIN)
        while not receiver.release_safe and time.monotonic() < deadline:
            assert poller.poll(LONG)
            os.eventfd_read(fd)
    assert receiver.release_safe


def test_a_handle_that_is_over_needs_no_garbage_collector(prefill: RankHost, decode: RankHost) -> None:
    receiver, sender = pair_of(prefill, decode)
    receiver.init([10], 4)
    sender.init(1, 4)
    sender.send([11])
    assert receiver.wait(LONG) is sender.wait(LONG) is KVPoll.Success
    gone = [weakref.ref(receiver), weakref.ref(sender)]
    gc.disable()
    try:
        prefill.senders.clear()
        del receiver, sender
        wait_until(lambda: [each() for each in gone] == [None, None])
    finally:
        gc.enable()
