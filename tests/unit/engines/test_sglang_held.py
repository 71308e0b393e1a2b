"""Pages of failed requests that SGLang holds: a room says nothing of a receiver, of which it may have several."""

from __future__ import annotations

from dataclasses import dataclass

from kvgrpc.engines.sglang.held import RoomsAwaitingRelease


@dataclass(eq=False)
class Receiver:
    release_safe: bool = False


def test_a_room_is_safe_when_nobody_writes_for_any_of_its_receivers() -> None:
    held, first, second = RoomsAwaitingRelease(), Receiver(), Receiver(release_safe=True)
    held.add(7, first)
    held.add(7, second)
    assert not held.safe(7), "the write for the first request still runs"
    assert held.safe(8), "of a room that failed before it gave pages nobody holds any"
    first.release_safe = True
    assert held.safe(7)


def test_a_release_of_one_request_forgets_no_other_that_somebody_writes_for() -> None:
    held, first, second = RoomsAwaitingRelease(), Receiver(), Receiver(release_safe=True)
    held.add(7, first)
    held.add(7, second)
    held.clear(7)
    assert not held.safe(7)
    first.release_safe = True
    held.clear(7)
    assert held.safe(7) and not len(held)


def test_a_receiver_that_is_told_twice_is_held_once() -> None:
    held, receiver = RoomsAwaitingRelease(), Receiver()
    held.add(7, receiver)
    held.add(7, receiver)
    assert len(held) == 1


def test_what_is_safe_and_never_asked_about_again_is_not_kept() -> None:
    """SGLang asks once more than it clears where its own time ran out first."""
    held, unsafe = RoomsAwaitingRelease(), Receiver()
    held.add(1, unsafe)
    most = 0
    for room in range(2, 20_000):
        receiver = Receiver()
        held.add(room, receiver)
        held.clear(room)
        receiver.release_safe = True
        most = max(most, len(held))
    assert most <= 2 * RoomsAwaitingRelease.SWEPT_FROM
    assert not held.safe(1)
