"""One wake-up for all who wait, from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from kvgrpc.events.notifier import Notifier


async def test_everybody_who_waits_hears_one_notification() -> None:
    notifier = Notifier()
    waiting = [notifier.next_change() for _ in range(100)]
    threading.Thread(target=notifier.notify).start()
    done, _ = await asyncio.wait(waiting, timeout=5)
    assert len(done) == len(set(waiting)) == 1


async def test_notifications_before_the_loop_gets_to_it_are_one() -> None:
    notifier = Notifier()
    wakes = 0
    wake = notifier._wake

    def counted() -> None:
        nonlocal wakes
        wakes += 1
        wake()

    notifier._wake = counted  # type: ignore[method-assign]
    for _ in range(1_000):
        notifier.notify()
    await asyncio.wait([notifier.next_change()], timeout=5)
    assert wakes == 1


async def test_a_notification_after_the_look_is_heard() -> None:
    notifier = Notifier()
    for _ in range(1_000):
        change = notifier.next_change()
        threading.Thread(target=notifier.notify).start() if _ % 100 == 0 else notifier.notify()
        done, _pending = await asyncio.wait([change], timeout=5)
        assert done


async def test_it_is_attached_while_anybody_listens() -> None:
    notifier = Notifier()
    listeners: list[Callable[[], None]] = []

    def listen(listener: Callable[[], None]) -> Callable[[], None]:
        listeners.append(listener)
        return lambda: listeners.remove(listener)

    with notifier.attached(listen):
        with notifier.attached(listen):
            assert len(listeners) == 1
        assert len(listeners) == 1
    assert listeners == []


def test_a_ring_after_the_loop_has_closed_is_harmless() -> None:
    async def make() -> Notifier:
        return Notifier()

    notifier = asyncio.run(make())
    notifier.notify()
    notifier.notify()
