"""One wake-up for all who wait, from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from kvgrpc.events.notifier import Bell


async def test_everybody_who_waits_hears_one_ring() -> None:
    bell = Bell()
    waiting = [bell.next_ring() for _ in range(100)]
    threading.Thread(target=bell.ring).start()
    done, _ = await asyncio.wait(waiting, timeout=5)
    assert len(done) == len(set(waiting)) == 1


async def test_rings_before_the_loop_gets_to_it_are_one() -> None:
    bell = Bell()
    wakes = 0
    wake = bell._wake

    def counted() -> None:
        nonlocal wakes
        wakes += 1
        wake()

    bell._wake = counted  # type: ignore[method-assign]
    for _ in range(1_000):
        bell.ring()
    await asyncio.wait([bell.next_ring()], timeout=5)
    assert wakes == 1


async def test_a_ring_after_the_look_is_heard() -> None:
    bell = Bell()
    for _ in range(1_000):
        ring = bell.next_ring()
        threading.Thread(target=bell.ring).start() if _ % 100 == 0 else bell.ring()
        done, _pending = await asyncio.wait([ring], timeout=5)
        assert done


async def test_it_is_attached_while_anybody_listens() -> None:
    bell = Bell()
    listeners: list[Callable[[], None]] = []

    def listen(listener: Callable[[], None]) -> Callable[[], None]:
        listeners.append(listener)
        return lambda: listeners.remove(listener)

    with bell.attached(listen):
        with bell.attached(listen):
            assert len(listeners) == 1
        assert len(listeners) == 1
    assert listeners == []


def test_a_ring_after_the_loop_has_closed_is_harmless() -> None:
    async def make() -> Bell:
        return Bell()

    bell = asyncio.run(make())
    bell.ring()
    bell.ring()
