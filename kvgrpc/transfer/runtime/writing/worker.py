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

from kvgrpc.dataplane.base import Outcome, Peer, Result, Transfer
from kvgrpc.model import Pool
from kvgrpc.observability import metrics
from kvgrpc.transfer.layout.plan import Geometry, Plan, geometry, joined
from kvgrpc.transfer.protocol.prefill.core import PrefillPair, PrefillRoom, Submission
from kvgrpc.transfer.runtime.guarded import GuardedPlane, attempt
from kvgrpc.transfer.runtime.writing.checksums import PageReader
from kvgrpc.transfer.runtime.writing.gather import GatheredTransfer, GatherStaging, PeerSlots
from kvgrpc.transfer.runtime.writing.queues import Sets, SubmissionQueue, SummingQueue

logger = logging.getLogger(__name__)
Outcomes = list[tuple[Submission, Result]]

_SHORTEST_SLEEP = 0.000_02
_SUBMISSIONS_AT_ONCE = 256
_SHORT_CHUNK_PAGES = 16
_CHUNKS_AT_ONCE = 4
_TOO_LATE = Result(Outcome.REJECTED, "the room ended before the write began")


class PeerMemory:
    """The memory that decode named in its Hello; the worker attaches it at the first write.

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
        self, plane: GuardedPlane, pools: Sequence[Pool], report: Callable[[Outcomes], None], gather_bytes: int = 0
    ) -> None:
        self._plane = plane
        self._staging = GatherStaging(plane, pools, gather_bytes)
        self._pools = tuple(pools)
        self._report = report
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting = SubmissionQueue()
        self._summing = SummingQueue()
        self._running: list[_Running] = []
        self._ended: Outcomes = []
        self._stopping = threading.Event()
        # Whoever holds it uses the plane, and what waits, runs and has ended is its own.
        self._turn = threading.Lock()
        self._over = False
        # Children of the counters, because labels() costs more than the count.
        name = plane.plane.name
        self._bytes = metrics.DATA_PLANE_BYTES.labels(name)
        self._descriptors = metrics.DATA_PLANE_DESCRIPTORS.labels(name)
        self._outcomes = [metrics.DATA_PLANE_SUBMISSIONS.labels(name, outcome.name) for outcome in Outcome]
        self.bytes_written = 0
        self.turns = 0
        self._thread = threading.Thread(target=self._work, name="kvgrpc-transfer", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """False when the thread is gone. ``turns`` grows at least twice a second while no call of the plane, and no
        ``wait``, takes longer.
        """
        return self._thread.is_alive() or self._stopping.is_set()

    @property
    def busy(self) -> bool:
        """True if there are writes to start or to poll."""
        return bool(self._running or self._waiting or self._summing) or not self._jobs.empty()

    @property
    def depths(self) -> tuple[int, int]:
        """Writes that wait for the thread, and writes that it looks after. Any thread may ask."""
        return len(self._waiting) + len(self._summing), len(self._running)

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
            submitted, self._plane.submitted = self._plane.submitted, 0
            if len(self._running) > running:
                self._jobs.put(_look)
        finally:
            self._turn.release()
        self._count_ended(ended, submitted)
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
                submitted, self._plane.submitted = self._plane.submitted, 0
                self._over = self._stopping.is_set() and not (self._running or self._waiting or self._summing)
                if self._over:
                    self._staging.close()
            if ended or submitted:
                self._count_ended(ended, submitted)
            if ended:
                self._report(ended)
            if moved or self._waiting or self._summing:
                sleep = _SHORTEST_SLEEP
            elif self._running and (interval := self._plane.poll_interval):
                time.sleep(min(sleep, interval))
                sleep *= 2

    def _count_ended(self, ended: Outcomes, submitted: int) -> None:
        for outcome, count in Counter([result.outcome for _, result in ended]).items():
            self._outcomes[outcome].inc(count)
        self._bytes.inc(sum([result.nbytes for _, result in ended]))
        self._descriptors.inc(submitted)

    def _next_job(self) -> Callable[[], None] | None:
        """Blocks only while there is nothing to move."""
        idle = not (self._running or self._waiting or self._summing)
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
        if self._summing:
            self._start_summed()

    def _start_summed(self) -> None:
        summed: list[Submission] = []
        for submission, refusal in self._summing.go_on():
            if refusal is None:
                summed.append(submission)
            else:
                self._ended.append((submission, refusal))
        self._start_all(summed)

    def _start_all(self, submissions: Sequence[Submission]) -> None:
        for group in self._groups(submissions):
            self.turns += 1
            if self._are_to_be_summed(group):
                continue
            planned = attempt(partial(self._planned, group))
            if isinstance(planned, Result):
                self._ended += [(submission, planned) for submission in group]
                continue
            for submission, plan in zip(group, planned, strict=True):
                self._start(submission, plan)

    def _planned(self, group: Sequence[Submission]) -> Sequence[Plan | GatheredTransfer]:
        """Returns what is to be written for each of them; nothing is sent yet."""
        memory = group[0].pair.peer
        assert isinstance(memory, PeerMemory) and memory.geometry is not None and memory.peer is not None
        if group[0].others is not None:
            return [_plan_of_pools(memory, submission) for submission in group]
        chunks = [(submission.source, submission.destination) for submission in group]
        slots = memory.gather
        if slots is not None and self._staging.fill(slots):
            return [GatheredTransfer(self._plane, memory.peer, slots, *chunk) for chunk in chunks]
        return memory.geometry.plans(chunks)

    def _groups(self, submissions: Iterable[Submission]) -> Iterator[list[Submission]]:
        """Neighbours that are planned in one pass: short chunks for one peer. None waits for another's ``wait``."""
        group: list[Submission] = []
        for submission in submissions:
            short = submission.wait is None and len(submission.source) <= _SHORT_CHUNK_PAGES
            short = short and submission.others is None
            if group and not (short and submission.pair.peer is group[0].pair.peer):
                yield group
                group = []
            refusal = self._refusal(submission)
            if refusal is not None:
                self._ended.append((submission, refusal))
                continue
            group.append(submission)
            if not short:
                yield group
                group = []
        if group:
            yield group

    def _are_to_be_summed(self, group: Sequence[Submission]) -> bool:
        """First: each comes back with its checksums, in a later turn."""
        memory = group[0].pair.peer
        if not isinstance(memory, PeerMemory) or not memory.verify or group[0].checksums is not None:
            return False
        for submission in group:
            submission.wait = None  # it is over
            self._summing.add(submission, _sets_to_sum(memory, submission))
        return True

    def _is_quick(self, submission: Submission) -> bool:
        """The plane says so, and nothing else is to be waited for."""
        memory, count = submission.pair.peer, len(submission.source)
        if submission.wait is not None or count > _SHORT_CHUNK_PAGES or not isinstance(memory, PeerMemory):
            return False
        if submission.others is not None or memory.verify:
            return False
        geometry = memory.geometry if memory.peer is not None else None
        return geometry is not None and count * geometry.bytes_of_a_page <= self._plane.quick_bytes

    def _refusal(self, submission: Submission) -> Result | None:
        """None: the room is open still, its pages are computed, and the peer's memory is known."""
        memory = submission.pair.peer
        if submission.wait is not None and not submission.record.ended:
            raised = attempt(submission.wait)
            if isinstance(raised, Result):
                return raised
        # Also where it ended during the wait: a rank may have been closed meanwhile, and its pages be gone.
        if submission.record.ended or not isinstance(memory, PeerMemory):
            return _TOO_LATE
        return None if memory.peer is not None else attempt(partial(self._attach, memory))

    def _start(self, submission: Submission, planned: Plan | GatheredTransfer) -> None:
        if isinstance(planned, GatheredTransfer):
            transfer: Transfer = planned
        elif len(planned.nbytes):
            memory = submission.pair.peer
            assert isinstance(memory, PeerMemory) and memory.peer is not None
            transfer = self._plane.submit(memory.peer, planned)
        else:
            self._ended.append((submission, Result(Outcome.DONE)))
            return
        result = self._plane.poll(transfer)
        if result is None:
            self._running.append(_Running(submission, transfer))
        else:
            self.bytes_written += result.nbytes
            self._ended.append((submission, result))

    def _attach(self, memory: PeerMemory) -> Result | None:
        """Why it could not be attached; None: it was."""
        memory.geometry = geometry(self._pools, memory.pools) if memory.owes else Geometry([], [])
        pools = zip(self._pools, memory.pools, strict=True) if memory.owes else ()
        memory.of_pool = [geometry([ours], [theirs]) for ours, theirs in pools]
        peer = self._plane.attach(memory.address)
        if isinstance(peer, Result):
            return peer
        memory.peer = peer
        memory.gather = self._staging.open(memory.geometry)
        return None

    def _attach_early(self, pair: PrefillPair) -> None:
        if not pair.up or not isinstance(pair.peer, PeerMemory) or pair.peer.peer is not None:
            return
        refusal = attempt(partial(self._attach, pair.peer))
        if refusal is not None:
            logger.info("a peer's memory could not be attached yet: %s", refusal.detail)

    def _poll(self) -> bool:
        if not self._running:
            return False
        still = [running for running in self._running if not self._has_ended(running)]
        moved = len(still) != len(self._running)
        self._running = still
        return moved

    def _has_ended(self, running: _Running) -> bool:
        result = self._plane.poll(running.transfer)
        if result is None:
            return False
        self.bytes_written += result.nbytes
        self._ended.append((running.submission, result))
        return True

    def _stop(self, record: PrefillRoom) -> None:
        for running in self._running:
            if running.submission.record is record:
                self._plane.stop(running.transfer)

    def _forget(self, pair: PrefillPair) -> None:
        memory = pair.peer
        if isinstance(memory, PeerMemory) and memory.peer is not None:
            peer, memory.peer = memory.peer, None
            if memory.gather is not None:
                self._staging.close_peer(memory.gather)
                memory.gather = None
            self._plane.detach(peer)


def _plan_of_pools(memory: PeerMemory, submission: Submission) -> Plan:
    """Each pool's pages with its own geometry, as one write."""
    sets = [(submission.source, submission.destination), *(submission.others or ())]
    pools = zip(memory.of_pool, sets, strict=False)  # of one that owes nothing no pool is known
    return joined([shape.plan(source, destination) for shape, (source, destination) in pools if len(source)])


def _sets_to_sum(memory: PeerMemory, submission: Submission) -> Sets:
    """Of each pool what reads it, our pages, and those of decode that they go to."""
    if submission.others is None:
        shapes = [memory.geometry] if memory.geometry is not None else []
    else:
        shapes = list(memory.of_pool)
    sets = [(submission.source, submission.destination), *(submission.others or ())]
    for shape, (source, destination) in zip(shapes, sets, strict=False):
        if memory.owes:
            yield PageReader(shape.source), source, destination


def _look() -> None:
    """A job that only ends the thread's wait for one: something runs that it is to poll."""
