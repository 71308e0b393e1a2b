"""One simulated rank: the shell of ``runtime/controller.py`` without threads, around the real state machines.

Its work is done in order, at moments that the world's seed chooses; its storage calls take as long as the store says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from kvgrpc.prefetch.model import NotEnoughPages, OperationKind, OperationState, PageResult, Stop
from kvgrpc.prefetch.protocol.backup import Backup
from kvgrpc.prefetch.protocol.book import OperationBook
from kvgrpc.prefetch.protocol.operation import (
    End,
    EndRead,
    Keep,
    LookUp,
    Operation,
    PageBatch,
    ReadNext,
    Release,
    Reserve,
    Say,
    Wake,
    Work,
    WriteNext,
    failed_pages,
)
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.prefetch.protocol.prefetch import LET_GO_SECONDS, HostShare, Prefetch
from kvgrpc.prefetch.protocol.votes import Decision, Stage
from tests.simulation.prefetch.parts import GARBAGE, Pool, Store, Tree

if TYPE_CHECKING:
    from tests.simulation.prefetch.world import Process, World

HOST_PAGES, SHARE = 26, 13
ALONE = "alone"
"""Tenant of backups that each rank makes by itself, as a write policy does."""
HOST_PROMPTS, HOST_PROMPT_PAGES = ("h0", "h1"), 6


class Shell:
    """A life of one rank. ``cut_before_reading``: operations that were cut while nothing of them could move."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.pool = Pool(HOST_PAGES, self._broken)
        self.tree = Tree(self.pool, self._broken)
        self.share = HostShare(SHARE)
        self.book = OperationBook(world.limits, nullcontext(), lambda: world.now)
        self.handed: dict[str, int] = {}
        self._fill_host()
        self._todo: deque[tuple[Operation, Work]] = deque()
        self._busy = {LookUp: 0, ReadNext: 0, WriteNext: 0}
        self._waiting: dict[type[Any], deque[Operation]] = {kind: deque() for kind in self._busy}
        self._hits: dict[str, int] = {}

    def _fill_host(self) -> None:
        """Two prompts that an engine computed: nobody has stored them."""
        for prompt in HOST_PROMPTS:
            hashes = [f"{prompt}:{number}" for number in range(HOST_PROMPT_PAGES)]
            pages = self.pool.take(len(hashes))
            assert not isinstance(pages, NotEnoughPages)
            self.pool.content.update(zip(pages.tolist(), hashes, strict=True))
            self.pool.commit(pages)
            self.tree.keep(hashes, 0, pages)

    # What a scheduler or the leader asks for.

    def begin(self, order: Order) -> None:
        world = self.world
        operation: Operation
        if order.kind is OperationKind.PREFETCH:
            operation = world.prefetch_class(order, world.limits, 1, world.now, page_tokens=1, share=self.share)
        else:
            pages = self.tree.pages_of(order.hashes)
            mine = partial(world.is_writer, self.process.number)
            operation = world.backup_class(
                order, world.limits, 1, world.now, pages=pages, agrees=order.tenant != ALONE, is_writer=mine
            )
        self.book.add(operation)
        self.step(operation, operation.begin)
        self._after(world.limits.operation_timeout + 0.6, lambda: self._must_be_cut(operation))

    def terminate(self, operation_id: str, stop: Stop) -> None:
        """Before it moves anything it ends with the work that is due, whatever storage does."""
        operation = next((each for each in self.book.open() if each.operation_id == operation_id), None)
        if operation is None:
            return
        early = (OperationState.QUEUED, OperationState.QUERYING, OperationState.AGREEING)
        idle = operation.state in early and not operation.cut and not operation.closing
        self.step(operation, lambda: operation.terminate(stop, self.world.now))
        if idle and isinstance(operation, Prefetch):
            self._after(1.0, lambda: self._must_have_ended(operation))

    def reset(self) -> None:
        for operation in self.book.open():
            self.terminate(operation.operation_id, Stop.SHUT_DOWN)
        self._after(3.0, lambda: [self.step(each, each.give_up) for each in self.book.open()])

    def _must_be_cut(self, operation: Operation) -> None:
        if not (operation.cut or operation.ended or operation.finishing or isinstance(operation, Backup)):
            if self._slept():
                self._after(1.0, lambda: self._must_be_cut(operation))
            else:
                self._broken(f"{operation.operation_id} goes on after its time")

    def _slept(self) -> bool:
        """What was due meanwhile may come in any order."""
        return self.world.now - self.process.awake_at < 0.5

    def _must_have_ended(self, operation: Operation) -> None:
        if not operation.ended and self._slept():
            self._after(1.0, lambda: self._must_have_ended(operation))
        elif not operation.ended:
            self._broken(f"{operation.operation_id} was cut before its first read and waits")

    def _must_have_let_go(self, operation: Operation) -> None:
        if not (operation.finishing or operation.closing) and self._slept():
            self._after(1.0, lambda: self._must_have_let_go(operation))
        elif not (operation.finishing or operation.closing):
            self._broken(f"{operation.operation_id} was cut and waits for a read that hangs")

    # Steps and their work.

    def step(self, operation: Operation, call: Callable[[], Any]) -> Any:
        before = operation.cut
        try:
            answer = call()
        except Exception as error:
            self._broken(f"{operation.operation_id}: {type(error).__name__}: {error}")
            operation.on_error(error)
            answer = None
        for work in operation.take_work():
            if isinstance(work, LookUp | ReadNext | WriteNext):
                self._waiting[type(work)].append(operation)
                self._after(0.0, partial(self._pump, type(work)))
            elif isinstance(work, Wake):
                self._after(work.seconds, lambda: self.step(operation, lambda: operation.tick(self.world.now)))
            else:
                self._todo.append((operation, work))
                self._after(self.world.random.uniform(0, 0.01), self._do_next)
        if operation.cut and not before and isinstance(operation, Prefetch):
            self._after(LET_GO_SECONDS + 0.6, lambda: self._must_have_let_go(operation))
        if self.share.held > self.share.pages and not before:
            self._broken(f"prefetches hold {self.share.held} of {self.share.pages} pages")
        return answer

    def _do_next(self) -> None:
        operation, work = self._todo.popleft()
        if isinstance(work, Release):
            self.pool.release(work.pages)
        elif isinstance(work, EndRead):
            self.pool.end_read(work.pages)
        elif isinstance(work, Say):
            answered = work.answered

            def decided(decision: Decision) -> None:
                if answered:
                    if decision.stage is Stage.HITS:
                        self._hits[operation.operation_id] = decision.pages
                    self.step(operation, lambda: operation.on_decided(decision))

            self.process.vote(work.vote, work.seconds, decided)
        elif isinstance(work, Reserve) and isinstance(operation, Prefetch):
            prefix = operation.hashes[: operation.covered]
            stood = self.tree.leading(prefix)
            room = self.tree.reserve(work.count, work.behind)
            if self.tree.leading(prefix) < stood:
                self._broken(f"{operation.operation_id}: room was made of the prefix that it stands behind")
            held = len(self.pool.reserved)
            if held > self.share.pages:
                self._broken(f"prefetches reserved {held} of {self.share.pages} pages")
            self.step(operation, lambda: operation.on_room(room))
        elif isinstance(work, Keep) and isinstance(operation, Prefetch):
            self.pool.commit(work.pages)
            found = self.tree.keep(work.hashes, work.covered, work.pages)
            self.handed[operation.operation_id] = len(work.hashes)
            self.step(operation, lambda: operation.on_kept(found))
        elif isinstance(work, End):
            self._end(operation, work)

    def _end(self, operation: Operation, work: End) -> None:
        if not self.book.end(operation, work.state, work.stop):
            self._broken(f"{operation.operation_id} ends twice")
        if operation.in_flight or any(not each.quiescent for each in operation.lingering):
            self._broken(f"{operation.operation_id} ends while storage has its pages")
        row = operation.row(self.world.now)
        if row.state is OperationState.DONE and row.completed < row.agreed:
            self._broken(f"{row.operation_id} is DONE with {row.completed} of {row.agreed} pages")
        fewer = row.kind is OperationKind.PREFETCH and row.agreed < self._hits.get(row.operation_id, 0)
        if row.state is OperationState.DONE and fewer and row.stop is Stop.NONE:
            self._broken(f"{row.operation_id} is DONE with fewer pages than every rank found, and no reason")
        if isinstance(operation, Backup) and row.state is OperationState.DONE:
            self.world.check_stored(self.process, operation)
        if row.state is not OperationState.DONE and row.stop is Stop.NONE and row.failure is None:
            self._broken(f"{row.operation_id} is {row.state.name} without a reason")
        self.process.forget(operation.operation_id)

    # Threads of storage.

    def _pump(self, kind: type[Any]) -> None:
        waiting = self._waiting[kind]
        while waiting and self._busy[kind] < 2:
            self._busy[kind] += 1
            operation = waiting.popleft()
            {LookUp: self._look_up, ReadNext: self._read, WriteNext: self._write}[kind](operation)

    def _rest(self, kind: type[Any]) -> None:
        self._busy[kind] -= 1
        self._pump(kind)

    def _look_up(self, operation: Operation) -> None:
        assert isinstance(operation, Prefetch)
        if not self.step(operation, operation.take_look_up):
            self._rest(LookUp)
            return
        covered = self.tree.leading(operation.hashes)
        self.step(operation, lambda: operation.on_covered(covered))
        store = self.process.store

        def answer() -> None:
            if store.is_down():
                self.step(operation, lambda: operation.on_found(0, Stop.BACKEND_DOWN, None))
            else:
                rest = operation.hashes[covered:]
                hit = next((number for number, each in enumerate(rest) if not store.has(each)), len(rest))
                self.step(operation, lambda: operation.on_found(hit, Stop.NONE, None))
            self._rest(LookUp)

        self._after(store.seconds(), answer)

    def _read(self, operation: Operation) -> None:
        self._move(operation, self.step(operation, lambda: operation.take_batch(self.world.now)), ReadNext)

    def _write(self, operation: Operation) -> None:
        batch = self.step(operation, lambda: operation.take_batch(self.world.now))
        if batch is not None and batch.look:
            self._after(self.process.store.seconds(), lambda: self._look(operation, batch, WriteNext))
        else:
            self._move(operation, batch, WriteNext)

    def _move(self, operation: Operation, batch: PageBatch | None, kind: type[Any]) -> None:
        if batch is None:
            self._rest(kind)
            return
        if operation.cut and batch.attempt == 0 and not batch.look:
            self._broken(f"{operation.operation_id} begins a batch after its end was asked for")
        pages = [int(operation.pages[index]) for index in batch.indices]
        self.pool.moving.update(pages)
        self._after(self.process.store.seconds(), lambda: self._moved(operation, batch, pages, kind))

    def _look(self, operation: Operation, batch: PageBatch, kind: type[Any]) -> None:
        assert isinstance(operation, Backup)
        store = self.process.store
        if store.is_down():
            self.step(operation, lambda: operation.on_look_failed("injected", self.world.now))
            self._rest(kind)
            return
        there = [store.has(operation.hashes[index]) for index in batch.indices]
        self._move(operation, self.step(operation, lambda: operation.on_there(batch, there, self.world.now)), kind)

    def _moved(self, operation: Operation, batch: PageBatch, pages: list[int], kind: type[Any]) -> None:
        store = self.process.store
        names = [operation.hashes[operation.covered + index] for index in batch.indices]
        if store.fails_whole():
            results = failed_pages(OSError("injected"), len(pages))
        else:
            results = [store.result(store.has(name) or kind is WriteNext) for name in names]
        for page, name, result in zip(pages, names, results, strict=True):
            self._settle(page, name, result, kind)
        if isinstance(operation, Prefetch):
            again = self.step(operation, lambda: operation.on_read(batch, results, self.world.now))
        else:
            assert isinstance(operation, Backup)
            again = self.step(operation, lambda: operation.on_written(batch, results, self.world.now))
        self._move(operation, again, kind)

    def _settle(self, page: int, name: str, result: PageResult, kind: type[Any]) -> None:
        """The bytes of one page have moved, or storage still has it and lets go later."""
        held = Store.holds(result)
        if held is None:
            self.pool.moving[page] -= 1
            if result.ok and kind is ReadNext:
                self.pool.content[page] = name
            elif result.ok:
                self._stored(page, name)
            return

        def let_go() -> None:
            held.over = True
            self.pool.moving[page] -= 1
            if kind is ReadNext:
                self.pool.content[page] = GARBAGE
            else:
                self._stored(page, name)

        self._after(self.world.random.choice([0.1, 3.0, 15.0]), let_go)

    def _stored(self, page: int, name: str) -> None:
        if self.pool.content.get(page) != name:
            self._broken(f"{name} is stored with the bytes of {self.pool.content.get(page)}")
        self.process.store.add(name)

    def _after(self, seconds: float, call: Callable[[], Any]) -> None:
        self.world.at(self.process, seconds, call, life=self.process.life)

    def _broken(self, what: str) -> None:
        self.world.violations.append(f"{self.world.now:.3f} rank {self.process.number}: {what}")
