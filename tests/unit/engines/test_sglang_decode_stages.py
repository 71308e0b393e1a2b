"""A hand-off in several pipeline stages of decode, which go round as SGLang's do; without SGLang."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from kvgrpc.engines.sglang.stages.decode import ending, over
from kvgrpc.transfer import KVPoll

BOTH = "other"  # a request that every stage has
DONE, LOST, OPEN = KVPoll.Success, KVPoll.Failed, KVPoll.Transferring


class Receiver:
    def __init__(self, poll: KVPoll) -> None:
        self.state = poll

    def poll(self) -> KVPoll:
        return self.state

    def give_up(self) -> None:
        self.state = LOST

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


class Scheduler:
    """SGLang's steps with a queue of transfers."""

    def __init__(self, polls: dict[str, KVPoll], is_first: bool) -> None:
        waiting = [
            SimpleNamespace(req=SimpleNamespace(rid=rid), kv_receiver=Receiver(poll)) for rid, poll in polls.items()
        ]
        self.disagg_decode_transfer_queue = SimpleNamespace(queue=waiting)
        self.pp_group = SimpleNamespace(is_first_rank=is_first)
        self.received: Any = None
        self.taken: list[str] = []

    def _pp_recv_pyobj_from_prev_stage(self) -> Any:
        return self.received

    def get_rids(self, queue: list[Any], is_send: bool, *groups: list[KVPoll]) -> tuple[list[str], ...]:
        return tuple([each.req.rid for each in queue if each.kv_receiver.poll() in group] for group in groups)

    def process_decode_transfer_queue(self, rids: list[str]) -> list[str]:
        transfers = self.disagg_decode_transfer_queue
        ended = [each for each in transfers.queue if each.req.rid in rids and each.kv_receiver.poll() in (DONE, LOST)]
        transfers.queue = [each for each in transfers.queue if each not in ended]
        taken = [each.req.rid for each in ended if each.kv_receiver.poll() is DONE]
        self.taken += taken
        return taken

    @property
    def left(self) -> list[str]:
        return [each.req.rid for each in self.disagg_decode_transfer_queue.queue]


def go_round(schedulers: list[Scheduler]) -> None:
    """What the stages agree on goes from the first to the last, and from there to each of them."""
    agree, end = over(lambda: True), ending(lambda: True)
    said: Any = None
    for scheduler in schedulers:
        scheduler.received = said
        said = agree(lambda _: pytest.fail("SGLang's own is not asked"), scheduler)
    for scheduler in schedulers:
        said = end(Scheduler.process_decode_transfer_queue, scheduler, said)


def stages(*polls: KVPoll) -> list[Scheduler]:
    return [Scheduler({"one": poll, BOTH: DONE}, is_first=not stage) for stage, poll in enumerate(polls)]


@pytest.mark.parametrize("where", [1, 2], ids=["two stages", "three stages"])
@pytest.mark.parametrize("rest", [DONE, OPEN, LOST], ids=lambda poll: poll.name)
def test_what_one_stage_has_lost_ends_in_all_and_nobody_takes_it(where: int, rest: KVPoll) -> None:
    for lost in range(where + 1):
        schedulers = stages(*(LOST if stage == lost else rest for stage in range(where + 1)))
        go_round(schedulers)
        assert [(each.left, each.taken) for each in schedulers] == [([], [BOTH])] * (where + 1), lost


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
    first.disagg_decode_transfer_queue.queue[0].kv_receiver.give_up()  # its aux row is another room's
    end(Scheduler.process_decode_transfer_queue, second, end(Scheduler.process_decode_transfer_queue, first, agreed))
    assert [(each.left, each.taken) for each in schedulers] == [([], [BOTH])] * 2


def test_what_the_round_before_took_is_not_lost_in_the_next() -> None:
    schedulers = stages(DONE, DONE)
    agree, end = over(lambda: True), ending(lambda: True)
    agreed = agree(len, schedulers[0])
    go_round(schedulers)
    assert end(Scheduler.process_decode_transfer_queue, schedulers[0], agreed) == [[], []]


def test_a_health_request_that_one_stage_gave_up_ends_in_all() -> None:
    schedulers = stages(LOST, DONE)
    schedulers[1].disagg_decode_transfer_queue.queue[0].kv_receiver = Fake(DONE)
    go_round(schedulers)
    assert [(each.left, each.taken) for each in schedulers] == [([], [BOTH])] * 2


def test_another_backend_is_left_alone() -> None:
    scheduler = Scheduler({"one": LOST}, is_first=True)
    assert over(lambda: False)(lambda asked: ["one"] * (asked is scheduler), scheduler) == ["one"]
    assert ending(lambda: False)(lambda asked, rids: rids, scheduler, ["one"]) == ["one"]
