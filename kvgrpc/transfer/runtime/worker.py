"""One thread per data-plane engine: plans, submits, polls and reports. What could wait never runs on the event loop.

The loop hands over lists of submissions and gets lists of outcomes; neither side ever waits for the other. Where a
plane says that a few short chunks take less time than waking the thread, the loop writes them itself (``write_now``).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvgrpc.dataplane.base import DataPlane, Outcome, Peer, Result, Transfer
from kvgrpc.model import Pool
from kvgrpc.observability import metrics
from kvgrpc.transfer.layout.plan import Geometry, Plan, geometry, joined
from kvgrpc.transfer.protocol.failures import raised
from kvgrpc.transfer.protocol.prefill_core import PrefillPair, PrefillRoom, Submission
from kvgrpc.transfer.runtime.checksums import PageReader, Sums
from kvgrpc.transfer.runtime.fair_queue import FairQueue
from kvgrpc.transfer.runtime.gather import GatheredTransfer, PeerSlots, Staging

logger = logging.getLogger(__name__)
Outcomes = list[tuple[Submission, Result]]

_SHORTEST_SLEEP = 0.000_02
_SUBMISSIONS_AT_ONCE = 256
_SHORT_CHUNK_PAGES = 16
_CHUNKS_AT_ONCE = 4


class PeerMemory:
    """What decode said of its memory in its Hello; the worker attaches it at the first write.

    ``owes``: False where another rank writes the same bytes, and a write here is done at once. ``verify``: it wants a
    checksum of each page.
    """

    __slots__ = ("address", "gather", "geometry", "of_pool", "owes", "peer", "pools", "verify")

    def __init__(self, pools: Sequence[Pool], address: bytes, owes: bool = True, verify: bool = False) -> None:
        self.verify = verify
        self.pools = tuple(pools)
        self.owes = owes
        self.address = address
        self.peer: Peer | None = None
        self.geometry: Geometry | None = None
        # Of each pool alone, for rooms whose pools have pages of their own.
        self.of_pool: list[Geometry] = []
        # Where its slices are copied together before they are written.
        self.gather: PeerSlots | None = None


@dataclass(slots=True, eq=False)
class _Running:
    submission: Submission
    transfer: Transfer


class TransferWorker:
    """Writes pages to peers on its own daemon thread. All methods are thread-safe and return at once, except close().

    ``report`` is called on the worker thread with what ended; it must only append and wake. ``gather_bytes``: bytes of
    memory in which slices of pages are copied together.
    """

    def __init__(
        self, plane: DataPlane, pools: Sequence[Pool], report: Callable[[Outcomes], None], gather_bytes: int = 0
    ) -> None:
        self._plane = plane
        self._staging = Staging(plane, pools, gather_bytes)
        self._pools = tuple(pools)
        self._report = report
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting = FairQueue()
        self._running: list[_Running] = []
        self._ended: Outcomes = []
        self._stopping = threading.Event()
        # Whoever holds it uses the plane, and what waits, runs and has ended is its own.
        self._turn = threading.Lock()
        self._over = False
        # Children of the counters, because labels() costs more than the count.
        self._bytes = metrics.DATA_PLANE_BYTES.labels(plane.name)
        self._descriptors = metrics.DATA_PLANE_DESCRIPTORS.labels(plane.name)
        self._submitted = 0
        self._outcomes = [metrics.DATA_PLANE_SUBMISSIONS.labels(plane.name, outcome.name) for outcome in Outcome]
        self.bytes_written = 0
        self.turns = 0
        self._thread = threading.Thread(target=self._work, name="kvgrpc-transfer", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """False when the thread is gone. ``turns`` grows at least twice a second while it makes progress."""
        return self._thread.is_alive() or self._stopping.is_set()

    @property
    def busy(self) -> bool:
        """Whether there are writes to start or to poll."""
        return bool(self._running or self._waiting) or not self._jobs.empty()

    @property
    def depths(self) -> tuple[int, int]:
        """Writes that wait for the thread, and writes that it looks after. Any thread may ask."""
        return len(self._waiting), len(self._running)

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Queues writes. Each is reported exactly once."""
        self._jobs.put(lambda: self._waiting.extend(submissions))

    def write_now(self, submissions: Sequence[Submission]) -> Outcomes | None:
        """Writes a few short chunks on the caller's thread and returns how those ended that did; the others are
        reported later, as ``submit``'s. None, and nothing done: it could take long, or others come first.
        """
        if len(submissions) > _CHUNKS_AT_ONCE or not self._turn.acquire(blocking=False):
            return None
        try:
            if self._over or self._waiting or not self._jobs.empty() or not all(map(self._is_quick, submissions)):
                return None
            running = len(self._running)
            self._start_all(submissions)
            ended, self._ended = self._ended, []
            submitted, self._submitted = self._submitted, 0
            if len(self._running) > running:
                self._jobs.put(_look)
        finally:
            self._turn.release()
        self._count(ended, submitted)
        return ended

    def attach(self, pair: PrefillPair) -> None:
        """Attaches a peer before its first write, which then need not wait for it; a failure is told by that write.

        Only while its session stands: the first contact with a peer that is gone holds the whole engine (7, writes).
        """
        self._jobs.put(lambda: self._attach_early(pair))

    def stop(self, record: PrefillRoom) -> None:
        """Starts no further write of the room; its submissions are still reported."""
        self._jobs.put(lambda: self._stop(record))

    def forget(self, pair: PrefillPair) -> None:
        """The pair is gone: its memory need not be known any more."""
        self._jobs.put(lambda: self._forget(pair))

    def close(self, deadline: float) -> bool:
        """Stops after what runs has ended, at most ``deadline`` seconds; True when nothing is left."""
        self._stopping.set()
        self._jobs.put(None)
        self._thread.join(deadline)
        return not self._thread.is_alive()

    def _work(self) -> None:
        sleep = _SHORTEST_SLEEP
        while not self._over:
            self.turns += 1
            job = self._next_job()
            with self._turn:
                self._take_jobs(job)
                moved = self._poll()  # first: what a peer has room for is for those that wait for it already
                self._start_some()
                ended, self._ended = self._ended, []
                submitted, self._submitted = self._submitted, 0
                self._over = self._stopping.is_set() and not self._running and not self._waiting
                if self._over:
                    self._staging.close()
            if ended or submitted:
                self._count(ended, submitted)
            if ended:
                self._report(ended)
            if moved or self._waiting:
                sleep = _SHORTEST_SLEEP
            elif self._running and self._plane.poll_interval:
                time.sleep(min(sleep, self._plane.poll_interval))
                sleep *= 2

    def _count(self, ended: Outcomes, submitted: int) -> None:
        for outcome, count in Counter([result.outcome for _, result in ended]).items():
            self._outcomes[outcome].inc(count)
        self._bytes.inc(sum([result.nbytes for _, result in ended]))
        self._descriptors.inc(submitted)

    def _next_job(self) -> Callable[[], None] | None:
        """Blocks only while there is nothing to move."""
        idle = not self._running and not self._waiting
        try:
            return self._jobs.get(timeout=0.5) if idle else self._jobs.get_nowait()
        except queue.Empty:
            return None

    def _take_jobs(self, job: Callable[[], None] | None) -> None:
        try:
            while job is not None:
                job()
                job = self._jobs.get_nowait()
        except queue.Empty:
            return

    def _start_some(self) -> None:
        if self._waiting:
            self._start_all(self._waiting.take(_SUBMISSIONS_AT_ONCE))

    def _start_all(self, submissions: Sequence[Submission]) -> None:
        for group in self._groups(submissions):
            try:
                self._start_group(group)
            except Exception as error:  # of planning: nothing was sent
                logger.exception("%d writes could not be planned", len(group))
                result = Result(Outcome.REJECTED, raised(error))
                self._ended += [(submission, result) for submission in group]

    def _start_group(self, group: Sequence[Submission]) -> None:
        memory = group[0].pair.peer
        assert isinstance(memory, PeerMemory) and memory.geometry is not None and memory.peer is not None
        for submission in group if memory.verify else ():
            submission.checksums = _checksums(memory, submission)
        submit, gather = partial(self._submit, memory.peer), memory.gather
        if gather is not None and gather.left and group[0].others is None:
            for submission in group:
                pages = submission.source, submission.destination
                self._start(submission, partial(GatheredTransfer, gather, submit, *pages))
            return
        if group[0].others is not None:
            plans = [_plan_of_pools(memory, submission) for submission in group]
        else:
            plans = memory.geometry.plans([(submission.source, submission.destination) for submission in group])
        for submission, plan in zip(group, plans, strict=True):
            if len(plan.nbytes):
                self._start(submission, partial(submit, plan))
            else:
                self._ended.append((submission, Result(Outcome.DONE)))

    def _submit(self, peer: Peer, plan: Plan) -> Transfer:
        self._submitted += len(plan.nbytes)
        return self._plane.submit(peer, *plan)

    def _groups(self, submissions: Iterable[Submission]) -> Iterator[list[Submission]]:
        """Neighbours that are planned in one pass: short chunks for one peer. None waits for another's ``wait``."""
        group: list[Submission] = []
        for submission in submissions:
            short = submission.wait is None and len(submission.source) <= _SHORT_CHUNK_PAGES
            short = short and submission.others is None
            if group and not (short and submission.pair.peer is group[0].pair.peer):
                yield group
                group = []
            if self._may_start(submission):
                group.append(submission)
                if not short:
                    yield group
                    group = []
        if group:
            yield group

    def _is_quick(self, submission: Submission) -> bool:
        """The plane says so, and nothing else is to be waited for."""
        memory, count = submission.pair.peer, len(submission.source)
        if submission.wait is not None or count > _SHORT_CHUNK_PAGES or not isinstance(memory, PeerMemory):
            return False
        if submission.others is not None or memory.verify:
            return False
        geometry = memory.geometry if memory.peer is not None else None
        # A plane that somebody else wrote may not have it yet.
        quick_bytes: int = getattr(self._plane, "quick_bytes", 0)
        return geometry is not None and count * geometry.bytes_of_a_page <= quick_bytes

    def _may_start(self, submission: Submission) -> bool:
        """The room is open still, its pages are computed, and the peer's memory is known."""
        memory = submission.pair.peer
        try:
            if submission.wait is not None and not submission.record.ended:
                submission.wait()
            # Also where it ended during the wait: a rank may have been closed meanwhile, and its pages be gone.
            if submission.record.ended or not isinstance(memory, PeerMemory):
                self._ended.append((submission, Result(Outcome.REJECTED, "the room ended before the write began")))
                return False
            self._attach(memory)
        except Exception as error:  # a foreign callable, or an address that is not one: nothing was sent
            self._ended.append((submission, Result(Outcome.REJECTED, raised(error))))
            return False
        return True

    def _start(self, submission: Submission, begin: Callable[[], Transfer]) -> None:
        try:
            transfer = begin()
            result = transfer.poll()
        except Exception as error:
            logger.exception("the data plane raised on submit")
            result = Result(Outcome.FAILED_UNKNOWN, raised(error))
        if result is None:
            self._running.append(_Running(submission, transfer))
        else:
            self.bytes_written += result.nbytes
            self._ended.append((submission, result))

    def _attach(self, memory: PeerMemory) -> None:
        if memory.peer is None:
            memory.geometry = geometry(self._pools, memory.pools) if memory.owes else Geometry([], [], 0)
            pools = zip(self._pools, memory.pools, strict=True) if memory.owes else ()
            memory.of_pool = [geometry([ours], [theirs]) for ours, theirs in pools]
            memory.peer = self._plane.attach(memory.address)
            memory.gather = self._staging.open(memory.geometry)

    def _attach_early(self, pair: PrefillPair) -> None:
        if not pair.up or not isinstance(pair.peer, PeerMemory):
            return
        try:
            self._attach(pair.peer)
        except Exception as error:
            logger.info("a peer's memory could not be attached yet: %s", error)

    def _poll(self) -> bool:
        if not self._running:
            return False
        still = [running for running in self._running if not self._end(running, self._result(running))]
        moved = len(still) != len(self._running)
        self._running = still
        return moved

    def _result(self, running: _Running) -> Result | None:
        try:
            return running.transfer.poll()
        except Exception as error:
            logger.exception("the data plane raised on poll")
            return Result(Outcome.FAILED_UNKNOWN, raised(error))

    def _end(self, running: _Running, result: Result | None) -> bool:
        if result is None:
            return False
        self.bytes_written += result.nbytes
        self._ended.append((running.submission, result))
        return True

    def _stop(self, record: PrefillRoom) -> None:
        for running in self._running:
            if running.submission.record is record:
                running.transfer.stop()

    def _forget(self, pair: PrefillPair) -> None:
        memory = pair.peer
        if isinstance(memory, PeerMemory) and memory.peer is not None:
            peer, memory.peer = memory.peer, None
            if memory.gather is not None:
                self._staging.close_peer(memory.gather)
                memory.gather = None
            try:
                self._plane.detach(peer)
            except Exception:
                logger.exception("the data plane raised on detach")


def _plan_of_pools(memory: PeerMemory, submission: Submission) -> Plan:
    """Each pool's pages with its own geometry, as one write."""
    sets = [(submission.source, submission.destination), *(submission.others or ())]
    pools = zip(memory.of_pool, sets, strict=False)  # of one that owes nothing no pool is known
    return joined([shape.plan(source, destination) for shape, (source, destination) in pools if len(source)])


def _checksums(memory: PeerMemory, submission: Submission) -> Sums:
    """Of the pages as they are now, by the pages of decode that they go to."""
    if submission.others is None:
        shapes = [memory.geometry] if memory.geometry is not None else []
    else:
        shapes = list(memory.of_pool)
    sets = [(submission.source, submission.destination), *(submission.others or ())]
    return tuple(
        (destination, PageReader(shape.source).sums(source))
        for shape, (source, destination) in zip(shapes, sets, strict=False)
        if memory.owes
    )


def _look() -> None:
    """A job that only ends the thread's wait for one: something runs that it is to poll."""
