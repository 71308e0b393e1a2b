"""A hand-off in several pipeline stages of decode, which go round as SGLang's do; without SGLang."""

from __future__ import annotations

import itertools
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvgrpc.engines.sglang.stages.decode import ending, over
from kvgrpc.errors import Failure, Reason
from kvgrpc.transfer import KVPoll

BOTH = "other"  # a request that every stage has
DONE, LOST, OPEN = KVPoll.Success, KVPoll.Failed, KVPoll.Transferring


class Receiver:
    def __init__(self, poll: KVPoll) -> None:
        self.state = poll
        self.kv_mgr: Any = None
        self.failure: Failure | None = None

    def poll(self) -> KVPoll:
        return self.state

    def give_up(self, why: Failure | None) -> None:
        self.state, self.failure = LOST, self.failure or why

    def abort(self) -> None:
        """Ours keeps pages that have come; SGLang's for health requests fails."""


class Fake:
    """Of a health request."""

    def __init__(self, poll: KVPoll) -> None:
        self.state = poll

    def poll(self) -> KVPoll:
        return self.state

    def abort(self) -> None:
        self.state = LOST


class Request:
    """As it stands in SGLang's queues, and in its list of those whose pages are held."""

    def __init__(self, rid: str, poll: KVPoll = OPEN, is_safe: bool = True) -> None:
        self.req = SimpleNamespace(rid=rid, bootstrap_room=hash(rid))
        self.kv_receiver: Any = Receiver(poll)
        self.is_safe = is_safe
        self.kv_receiver.kv_mgr = SimpleNamespace(is_abort_release_safe=lambda room, acks: self.is_safe)


class Transfers:
    """SGLang's queue of them."""

    def __init__(self, waiting: list[Request]) -> None:
        self.queue = waiting
        self._deferred_releases: list[tuple[Request, float, float, int, int]] = []

    def pop(self, rids: list[str]) -> list[str]:
        ended = [each for each in self.queue if each.req.rid in rids and each.kv_receiver.poll() in (DONE, LOST)]
        self.queue = [each for each in self.queue if each not in ended]
        self._deferred_releases += [(each, 0.0, math.inf, 0, 0) for each in ended if each.kv_receiver.poll() is LOST]
        return [each.req.rid for each in ended if each.kv_receiver.poll() is DONE]

    def resolve(self) -> int:
        """Pages that came back."""
        before, now = self._deferred_releases, time.monotonic()
        self._deferred_releases = [entry for entry in before if not entry[0].is_safe and now < entry[2]]
        return len(before) - len(self._deferred_releases)

    def expire(self) -> None:
        self._deferred_releases = [(entry[0], 0.0, 0.0, 0, 0) for entry in self._deferred_releases]


class Scheduler:
    """SGLang's steps with its queues, where a request takes one page. ``free``: of its pool."""

    def __init__(self, polls: dict[str, KVPoll], is_first: bool, free: int = 0) -> None:
        waiting = [Request(rid, poll) for rid, poll in polls.items()]
        self.disagg_decode_transfer_queue = Transfers(waiting)
        self.disagg_decode_prealloc_queue = SimpleNamespace(queue=[], pop_preallocated=self.pop_preallocated)
        self.pp_group = SimpleNamespace(is_first_rank=is_first)
        self.received: Any = None
        self.taken: list[str] = []
        self.free = free

    def _pp_recv_pyobj_from_prev_stage(self) -> Any:
        return self.received

    def get_rids(self, queue: list[Any], is_send: bool, *groups: list[KVPoll]) -> tuple[list[str], ...]:
        return tuple([each.req.rid for each in queue if each.kv_receiver.poll() in group] for group in groups)

    def process_decode_transfer_queue(self, rids: list[str]) -> list[str]:
        self.free += self.disagg_decode_transfer_queue.resolve()
        taken = self.disagg_decode_transfer_queue.pop(rids)
        self.taken += taken
        return taken

    def pop_preallocated(self, pp_good_rids: list[str], pp_bad_rids: list[str]) -> tuple[list[Any], list[Any]]:
        admits = self.disagg_decode_prealloc_queue
        failed = [each for each in admits.queue if each.req.rid in pp_bad_rids]
        good = [each for each in admits.queue if each.req.rid in pp_good_rids][: self.free]
        self.free -= len(good)
        admits.queue = [each for each in admits.queue if each not in [*failed, *good]]
        return good, failed

    @property
    def left(self) -> list[str]:
        return [each.req.rid for each in self.disagg_decode_transfer_queue.queue]


def go_round(schedulers: list[Scheduler]) -> None:
    end_round(schedulers, begin_round(schedulers))


def begin_round(schedulers: list[Scheduler]) -> Any:
    """What the stages agree on, from the first to the last."""
    said: Any = None
    for scheduler in schedulers:
        scheduler.received = said
        said = over(lambda: True)(lambda _: pytest.fail("SGLang's own is not asked"), scheduler)
    return said


def end_round(schedulers: list[Scheduler], said: Any) -> None:
    """From the last it goes to each of them; SGLang begins the next round before."""
    for scheduler in schedulers:
        said = ending(lambda: True)(Scheduler.process_decode_transfer_queue, scheduler, said)


def admit(schedulers: list[Scheduler]) -> None:
    """SGLang's own: what every stage waits to admit goes round, and each passes on what it has admitted."""
    good = [each.req.rid for each in schedulers[0].disagg_decode_prealloc_queue.queue]
    for scheduler in schedulers[1:]:
        waiting = [each.req.rid for each in scheduler.disagg_decode_prealloc_queue.queue]
        good = [rid for rid in good if rid in waiting]
    for scheduler in schedulers:
        admitted, _ = scheduler.pop_preallocated(good, [])
        scheduler.disagg_decode_transfer_queue.queue += admitted
        good = [each.req.rid for each in admitted]


def stages(*polls: KVPoll) -> list[Scheduler]:
    return [Scheduler({"one": poll, BOTH: DONE}, is_first=not stage) for stage, poll in enumerate(polls)]


@pytest.mark.parametrize("where", [1, 2], ids=["two stages", "three stages"])
@pytest.mark.parametrize("rest", [DONE, OPEN, LOST], ids=lambda poll: poll.name)
def test_what_one_stage_has_lost_ends_in_all_and_nobody_takes_it(where: int, rest: KVPoll) -> None:
    for lost in range(where + 1):
        schedulers = stages(*(LOST if stage == lost else rest for stage in range(where + 1)))
        go_round(schedulers)
        assert [(each.left, each.taken) for each in schedulers] == [([], [BOTH])] * (where + 1), lost


@pytest.mark.parametrize("stage", range(3))
def test_why_one_stage_has_lost_it_is_told_in_all(stage: int) -> None:
    why = Failure(Reason.PEER_LOST, "prefill died")
    schedulers = stages(*(LOST if stage == lost else OPEN for lost in range(3)))
    receivers = [each.disagg_decode_transfer_queue.queue[0].kv_receiver for each in schedulers]
    receivers[stage].failure = why
    go_round(schedulers)
    assert [receiver.failure for receiver in receivers] == [why] * 3


def test_a_stage_that_has_a_reason_of_its_own_keeps_it() -> None:
    reasons = [Failure(Reason.SERVER_DRAINING, "prefill ends"), Failure(Reason.PEER_LOST, "prefill died")]
    schedulers = stages(LOST, LOST)
    receivers = [each.disagg_decode_transfer_queue.queue[0].kv_receiver for each in schedulers]
    for receiver, why in zip(receivers, reasons, strict=True):
        receiver.failure = why
    go_round(schedulers)
    assert [receiver.failure for receiver in receivers] == reasons


def test_what_all_have_is_taken_by_all_and_what_one_waits_for_stays() -> None:
    for polls in itertools.product((DONE, OPEN), repeat=3):
        schedulers = stages(*polls)
        go_round(schedulers)
        expected = ([], ["one", BOTH]) if OPEN not in polls else (["one"], [BOTH])
        assert [(each.left, each.taken) for each in schedulers] == [expected] * 3, polls


def test_what_the_first_stage_could_not_take_after_all_ends_in_the_next() -> None:
    first, second = schedulers = stages(DONE, DONE)
    agree, end = over(lambda: True), ending(lambda: True)
    second.received = agree(len, first)
    agreed = agree(len, second)
    first.disagg_decode_transfer_queue.queue[0].kv_receiver.give_up(None)  # its aux row is another room's
    end(Scheduler.process_decode_transfer_queue, second, end(Scheduler.process_decode_transfer_queue, first, agreed))
    assert [(each.left, each.taken) for each in schedulers] == [([], [BOTH])] * 2


def test_what_the_round_before_took_is_not_lost_in_the_next() -> None:
    schedulers = stages(DONE, DONE)
    agree, end = over(lambda: True), ending(lambda: True)
    agreed = agree(len, schedulers[0])
    go_round(schedulers)
    assert end(Scheduler.process_decode_transfer_queue, schedulers[0], agreed) == [[], {}, [], [], []]


def test_a_health_request_that_one_stage_gave_up_ends_in_all() -> None:
    schedulers = stages(LOST, DONE)
    schedulers[1].disagg_decode_transfer_queue.queue[0].kv_receiver = Fake(DONE)
    go_round(schedulers)
    assert [(each.left, each.taken) for each in schedulers] == [([], [BOTH])] * 2


@pytest.mark.parametrize("hung", range(3), ids=lambda stage: f"stage {stage} hangs")
def test_a_page_of_a_failed_hand_off_is_free_in_all_stages_at_once_so_that_all_admit_the_same(hung: int) -> None:
    schedulers = stages(*(LOST if stage == hung else OPEN for stage in range(3)))
    for stage, scheduler in enumerate(schedulers):
        scheduler.disagg_decode_transfer_queue.queue[0].is_safe = stage != hung
        scheduler.disagg_decode_prealloc_queue.queue = [Request("next")]
    failed = [scheduler.disagg_decode_transfer_queue.queue[0] for scheduler in schedulers]
    for _ in range(3):
        go_round(schedulers)
        admit(schedulers)
        assert [(each.left, each.free) for each in schedulers] == [([], 0)] * 3, "prefill may still write to one's page"
    failed[hung].is_safe = True
    go_round(schedulers)
    assert [each.free for each in schedulers] == [1] * 3
    admit(schedulers)
    assert [each.left for each in schedulers] == [["next"]] * 3


def test_a_page_that_is_held_for_too_long_is_free_in_all_stages_at_once() -> None:
    schedulers = stages(LOST, LOST)
    for scheduler in schedulers:
        scheduler.disagg_decode_transfer_queue.queue[0].is_safe = False
    go_round(schedulers)
    for scheduler, free in zip(schedulers, (0, 1), strict=True):
        scheduler.disagg_decode_transfer_queue.expire()
        go_round(schedulers)
        assert [each.free for each in schedulers] == [free] * 2


@pytest.mark.parametrize("first", [DONE, LOST], ids=lambda poll: poll.name)
def test_what_a_later_stage_never_admitted_ends_in_all(first: KVPoll) -> None:
    schedulers = stages(first, OPEN, OPEN)
    later = schedulers[1].disagg_decode_transfer_queue.queue
    schedulers[1].disagg_decode_prealloc_queue.queue = [later.pop(0)]
    go_round(schedulers)
    go_round(schedulers)
    assert [(each.left, each.taken, each.free) for each in schedulers] == [([], [BOTH], free) for free in (1, 0, 1)]
    assert not schedulers[1].disagg_decode_prealloc_queue.queue, "its entry stays"


def test_what_a_later_stage_does_not_know_is_not_lost_there() -> None:
    (scheduler,) = stages(OPEN)
    scheduler.pp_group.is_first_rank, scheduler.received = False, [["unknown"], {}, [], [], []]
    assert over(lambda: True)(len, scheduler) == [[], {}, [], [], []]


def test_a_round_under_way_does_not_end_the_next_request_of_that_name() -> None:
    schedulers = stages(LOST, OPEN)
    rounds = [begin_round(schedulers), begin_round(schedulers)]
    end_round(schedulers, rounds[0])
    for scheduler in schedulers:
        scheduler.disagg_decode_prealloc_queue.queue = [Request("one")]
    end_round(schedulers, rounds[1])
    assert [len(each.disagg_decode_prealloc_queue.queue) for each in schedulers] == [1, 1]


def test_samples_of_a_room_are_held_until_none_of_them_is_under_way() -> None:
    """SGLang asks of a room once more when it frees: by then another sample may be held in one stage alone."""
    schedulers = [Scheduler({"one": LOST, "two": OPEN}, is_first=not stage) for stage in range(2)]
    for scheduler in schedulers:
        for waiting in scheduler.disagg_decode_transfer_queue.queue:
            waiting.req.bootstrap_room = 7
    go_round(schedulers)
    go_round(schedulers)
    assert [each.free for each in schedulers] == [0, 0]
    for scheduler in schedulers:
        scheduler.disagg_decode_transfer_queue.queue[0].kv_receiver.state = LOST
    go_round(schedulers)
    go_round(schedulers)
    assert [each.free for each in schedulers] == [2, 2]


def test_what_waits_to_be_admitted_in_all_stages_is_not_lost() -> None:
    schedulers = stages(OPEN, OPEN)
    for scheduler in schedulers:
        scheduler.disagg_decode_prealloc_queue.queue = [Request("next")]
    go_round(schedulers)
    assert all(scheduler.disagg_decode_prealloc_queue.queue for scheduler in schedulers)


def test_another_backend_is_left_alone() -> None:
    scheduler = Scheduler({"one": LOST}, is_first=True)
    assert over(lambda: False)(lambda asked: ["one"] * (asked is scheduler), scheduler) == ["one"]
    assert ending(lambda: False)(lambda asked, rids: rids, scheduler, ["one"]) == ["one"]
