"""The state machines by themselves, as ``runtime/controller.py`` tells them what happened: what each step asks for, and
what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from kvgrpc.prefetch.model import NotEnoughPages, OperationKind, OperationState, PageOutcome, PrefetchLimits, Stop
from kvgrpc.prefetch.protocol.backup import Backup
from kvgrpc.prefetch.protocol.book import OperationBook
from kvgrpc.prefetch.protocol.operation import End, Keep, Operation, Release, Reserve, Say, Work
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.prefetch.protocol.prefetch import HostShare, Prefetch
from kvgrpc.prefetch.protocol.votes import Decision, Stage
from kvgrpc.prefetch.storage.base import OK, PageResult, failed

LIMITS = PrefetchLimits(threshold_tokens=1, batch_pages=128, readers=2)


def order(kind: OperationKind, pages: int) -> Order:
    return Order(kind=kind, hashes=tuple(f"{number:05d}" for number in range(pages)), operation_id="op", timeout=30.0)


def prefetch(pages: int, share: int | None = None, held: int = 0, limits: PrefetchLimits = LIMITS) -> Prefetch:
    begun = Prefetch(
        order(OperationKind.PREFETCH, pages), limits, share=HostShare(pages if share is None else share, held)
    )
    begun.begin()
    assert [type(each).__name__ for each in begun.take_work()] == ["Wake", "LookUp"]
    return begun


def work(operation: Operation, kind: type[Work]) -> Any:
    """The one piece of work of a kind that it asks for now."""
    (found,) = [each for each in operation.take_work() if isinstance(each, kind)]
    return found


def found(operation: Prefetch, hit: int) -> None:
    assert operation.take_look_up()
    operation.on_covered(0)
    operation.on_found(hit, Stop.NONE, None)


def agreed(operation: Operation, pages: int | None = None, stop: Stop = Stop.NONE) -> Decision:
    """All ranks say what this one said, or ``pages``."""
    vote = work(operation, Say).vote
    decision = Decision(vote.key, vote.stage, vote.pages if pages is None else pages, stop or vote.stop)
    operation.on_decided(decision)
    return decision


def reserved(operation: Prefetch) -> int:
    count = work(operation, Reserve).count
    operation.on_room(np.arange(count))
    return int(count)


def reading(pages: int, **others: Any) -> Prefetch:
    """One that all ranks have room for."""
    operation = prefetch(pages, **others)
    found(operation, pages)
    agreed(operation)
    reserved(operation)
    agreed(operation)
    return operation


def read_all(operation: Prefetch, result: PageResult = OK) -> None:
    while (batch := operation.take_batch(0.0)) is not None:
        assert operation.on_read(batch, [result] * len(batch.indices), 0.0) is None


class Counted(list[PageOutcome]):
    """How often an outcome is looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1 if isinstance(index, int) else len(range(*index.indices(len(self))))
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[PageOutcome]:
        self.looks += len(self)
        return super().__iter__()


@pytest.mark.parametrize("pages", [1_000, 65_536])
@pytest.mark.parametrize("kind", OperationKind)
def test_a_page_costs_the_same_in_an_operation_of_any_size(kind: OperationKind, pages: int) -> None:
    operation: Prefetch | Backup
    if kind is OperationKind.PREFETCH:
        operation = reading(pages)
        operation.outcomes = outcomes = Counted(operation.outcomes)
        read_all(operation)
    else:
        operation = Backup(order(kind, pages), LIMITS, pages=np.arange(pages))
        operation.begin()
        operation.outcomes = outcomes = Counted(operation.outcomes)
        while (batch := operation.take_batch(0.0)) is not None:
            operation.on_written(batch, [OK] * len(batch.indices), 0.0)
    assert operation.completed == pages
    assert outcomes.looks <= 4 * pages


@pytest.mark.parametrize(("share", "held", "stop"), [(5, 0, Stop.CAPACITY), (12, 7, Stop.RATE_LIMITED)])
def test_one_that_is_cut_to_the_share_of_the_host_ends_done_with_the_reason(share: int, held: int, stop: Stop) -> None:
    operation = prefetch(10, share=share, held=held)
    found(operation, 10)
    agreed(operation)
    assert reserved(operation) == 5
    agreed(operation)
    read_all(operation)
    agreed(operation)
    assert len(work(operation, Keep).pages) == 5
    operation.on_kept(5)
    end = work(operation, End)
    assert (end.state, end.stop, operation.completed) == (OperationState.DONE, stop, 5)


def test_one_that_another_rank_had_too_little_room_for_ends_done_with_its_reason() -> None:
    operation = prefetch(10)
    found(operation, 10)
    agreed(operation)
    assert reserved(operation) == 10
    agreed(operation, 6, Stop.CAPACITY)
    assert len(work(operation, Release).pages) == 4
    read_all(operation)
    agreed(operation)
    operation.on_kept(6)
    assert work(operation, End) == End(OperationState.DONE, Stop.CAPACITY)


def test_one_that_brings_all_that_storage_has_needs_no_reason() -> None:
    operation = prefetch(10)
    found(operation, 7)
    agreed(operation)
    reserved(operation)
    agreed(operation)
    read_all(operation)
    agreed(operation)
    operation.on_kept(7)
    assert work(operation, End) == End(OperationState.DONE, Stop.NONE)


@pytest.mark.parametrize("step", ["queued", "looks up", "agrees on hits", "agrees on room"])
def test_a_cancel_before_the_first_read_ends_it_at_once_and_tells_every_rank(step: str) -> None:
    operation = prefetch(10)
    if step != "queued":
        assert operation.take_look_up()
        operation.on_covered(3)
    if step.startswith("agrees"):
        operation.on_found(7, Stop.NONE, None)
    if step == "agrees on room":
        agreed(operation)
        reserved(operation)
    operation.terminate(Stop.CANCELLED, 0.0)
    asked = operation.take_work()
    said = [(each.vote.stage, each.vote.pages) for each in asked if isinstance(each, Say) and not each.answered]
    assert said == [(stage, operation.covered) for stage in Stage]
    assert asked[-1] == End(OperationState.CANCELLED, Stop.CANCELLED)
    assert operation.share.held == 0
    # What comes later finds it gone.
    operation.on_found(7, Stop.NONE, None)
    operation.on_decided(Decision("op", Stage.RESERVED, 7))
    assert not operation.take_look_up() and operation.take_batch(0.0) is None and operation.take_work() == []


def test_a_cancel_while_the_keeper_makes_room_gives_that_room_back_before_the_end() -> None:
    operation = prefetch(10)
    found(operation, 10)
    agreed(operation)
    asked = work(operation, Reserve)
    operation.terminate(Stop.CANCELLED, 0.0)
    assert operation.take_work() == [], "the room is on its way"
    operation.on_room(np.arange(asked.count))
    kinds = [type(each).__name__ for each in operation.take_work()]
    assert kinds == ["Say", "Say", "Say", "Release", "End"] and operation.share.held == 0


def test_a_keeper_that_lacks_room_is_asked_for_less_until_it_is_not_worth_it() -> None:
    operation = prefetch(10)
    found(operation, 10)
    agreed(operation)
    assert work(operation, Reserve).count == 10
    operation.on_room(NotEnoughPages(4))
    assert work(operation, Reserve).count == 6 and operation.share.held == 6
    operation.on_room(NotEnoughPages(6))
    assert operation.take_work()[-1] == End(OperationState.DECLINED, Stop.CAPACITY)
    assert operation.share.held == 0


def test_the_pages_of_a_failed_step_go_back() -> None:
    operation = reading(10)
    batch = operation.take_batch(0.0)
    assert batch is not None
    operation.on_error(RuntimeError("a bug"))
    assert not [each for each in operation.take_work() if isinstance(each, Say | End)], "a read is on its way"
    operation.on_read(batch, [failed("broken")] * len(batch.indices), 0.0)
    agreed(operation)
    asked = operation.take_work()
    assert [type(each).__name__ for each in asked] == ["Release", "End"]
    assert operation.failure is not None and "a bug" in operation.failure.message


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    operation = prefetch(10)
    operation.on_decided(Decision("op", Stage.HITS, 10))
    operation.on_decided(Decision("op", Stage.COMPLETED, 10))
    assert operation.state is OperationState.QUEUED and operation.take_work() == []


def test_bytes_are_those_of_pages_that_came() -> None:
    operation = reading(10)
    operation.page_bytes = 7
    batch = operation.take_batch(0.0)
    assert batch is not None
    operation.on_read(batch, [OK] * 6 + [failed("broken")] * 4, 0.0)
    assert (operation.nbytes, operation.completed) == (42, 6)


def test_a_backup_that_storage_still_reads_is_not_shut_down() -> None:
    operation = Backup(order(OperationKind.BACKUP, 4), LIMITS, pages=np.arange(4))
    operation.begin()
    batch = operation.take_batch(0.0)
    assert batch is not None and not operation.shut_down()
    operation.on_written(batch, [OK] * 4, 0.0)
    assert operation.shut_down()


def test_a_book_tells_each_change_once_and_those_since_a_revision() -> None:
    book = OperationBook(LIMITS, nullcontext(), lambda: 0.0)
    told: list[OperationState] = []
    book.listen(lambda operation: told.append(operation.state))
    first, second = (book.add(Operation(Order(kind=OperationKind.BACKUP, hashes=("a",)))) for _ in range(2))
    assert book.changed_since(first.revision) == [second]
    assert book.end(first, OperationState.DONE) and not book.end(first, OperationState.FAILED)
    assert told == [OperationState.QUEUED, OperationState.QUEUED, OperationState.DONE]
    assert book.changed_since(second.revision) == [first]


def test_room_that_comes_after_a_bug_ended_it_goes_back() -> None:
    operation = prefetch(4)
    found(operation, 4)
    agreed(operation)
    assert work(operation, Reserve).count == 4
    operation.on_error(RuntimeError("a bug"))
    assert work(operation, End).state is OperationState.FAILED
    operation.on_room(np.arange(4))
    assert list(work(operation, Release).pages) == [0, 1, 2, 3]


def test_a_rank_that_has_what_the_others_read_says_so_at_their_last_vote() -> None:
    """Another rank has room for two pages only, of which this one has four: it reads none, and is counted on."""
    operation = prefetch(8)
    assert operation.take_look_up()
    operation.on_covered(4)
    operation.on_found(4, Stop.NONE, None)
    agreed(operation)
    reserved(operation)
    agreed(operation, 2, Stop.CAPACITY)
    asked = operation.take_work()
    votes = [each.vote for each in asked if isinstance(each, Say)]
    assert [(vote.stage, vote.pages) for vote in votes] == [(Stage.COMPLETED, 4)]
    assert [each for each in asked if isinstance(each, End)] == [End(OperationState.DECLINED, Stop.CAPACITY)]
    assert sum(len(each.pages) for each in asked if isinstance(each, Release)) == 4


@pytest.mark.parametrize("stop", [Stop.RANK_ABSENT, Stop.CAPACITY])
def test_nobody_is_told_of_a_last_step_that_nobody_takes(stop: Stop) -> None:
    operation = prefetch(8)
    found(operation, 8)
    agreed(operation)
    reserved(operation)
    agreed(operation, 0, stop)
    assert [type(each) for each in operation.take_work()] == [Release, End]
