"""The storage backend ``mooncake``. docs/storage.md has its config, the topology and what happens in every fault."""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from kvgrpc.errors import FeatureDisabled, InvalidRequest
from kvgrpc.prefetch.storage.base import (
    MISSING,
    OK,
    MemoryRange,
    Nbytes,
    PageBuffers,
    PageResult,
    Removed,
    Seconds,
    StorageDown,
    StorageStats,
    Threads,
    check_batch,
    check_keys,
    failed,
    leading_pages,
    page_bytes,
    timed_out,
)
from kvgrpc.prefetch.storage.flat import other_size
from kvgrpc.prefetch.storage.mooncake.link import Link, NotShared, Pending
from kvgrpc.prefetch.storage.mooncake.messages import EXISTS, EXPIRED, MASTER_DOWN, Reply, Start, is_lost, result_of
from kvgrpc.prefetch.storage.mooncake.windows import StoreLane, StoreStaging, Windows
from kvgrpc.prefetch.storage.paged import Tally, asking
from kvgrpc.settings import read

_MOST = 100_000


class RecentlyUnreadable:
    """Remembers keys for ``seconds``, the newest 100,000. Thread-safe.

    An owner that was killed stays known to the master until client_ttl is over, and every read from it costs a second.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._until: OrderedDict[str, float] = OrderedDict()

    def add(self, key: str) -> None:
        with self._lock:
            self._until[key] = time.monotonic() + self._seconds
            self._until.move_to_end(key)
            while len(self._until) > _MOST:
                self._until.popitem(last=False)

    def __contains__(self, key: str) -> bool:
        if not self._until:
            return False
        with self._lock:
            until = self._until.get(key)
            if until is not None and until < time.monotonic():
                del self._until[key]
                return False
            return until is not None


logger = logging.getLogger(__name__)

_INSTALL = "pip install 'kvgrpc[mooncake-cpu]' (or 'kvgrpc[mooncake]' with CUDA)"
_MASTER = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):\d{1,5}")
_MOST_IN_CALL = 4096
_MOST_BYTES_IN_CALL = 64 << 20

Buffers = list[list[tuple[int, int, int]]]


class MooncakeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Config of the backend ``mooncake``."""

    master: str
    """HOST:PORT of the master."""
    host: str = "127.0.0.1"
    """Address of this machine at which the others reach it."""
    namespace: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{0,64}$")] = "kvgrpc"
    """Goes before every key; ``clear`` drops what has it. Empty: keys as they are, and no ``clear``."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    """RDMA devices, with commas."""
    segment_bytes: Nbytes = 0
    """Memory that this process's client lends to the Store; gone with it. 0: owners of their own lend it."""
    staging_bytes: Annotated[int, msgspec.Meta(ge=1 << 16)] = 64 << 20
    """Shared memory for pages that lie in memory which only this process can see; made when first needed."""
    threads: Threads = 4
    """Calls that run at once."""
    start_timeout: Seconds = 10.0
    """Seconds that opening waits for the master. It goes on without, and connects when the master answers."""
    lost_seconds: Seconds = 15.0
    """For how long a page whose owner did not answer counts as missing; the master's client_ttl and some."""


class MooncakeBackend:
    """A StorageBackend over a Mooncake Store, whose library runs in a process of its own (see ``link``).

    Zero copy for buffers in registered memory that the other process can map too: shared mappings of memfds or of files
    in /dev/shm. Everything else is copied once, through ``staging_bytes`` of such memory.
    """

    name = "mooncake"

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> MooncakeBackend:
        """Raises InvalidRequest, and FeatureDisabled where Mooncake is not installed."""
        config = read(MooncakeConfig, settings)
        if not _MASTER.fullmatch(config.master):
            raise InvalidRequest.of("master", config.master, "HOST:PORT of a Mooncake Store's master")
        if importlib.util.find_spec("mooncake") is None:
            raise FeatureDisabled(
                f"storage 'mooncake' needs Mooncake: {_INSTALL}",
                metadata={"feature": "storage.mooncake", "howToEnable": _INSTALL},
            )
        return cls(config)

    def __init__(self, config: MooncakeConfig) -> None:
        self._config = config
        self._prefix = f"{config.namespace}/" if config.namespace else ""
        self._link = Link(
            Start(
                host=config.host,
                master=config.master,
                protocol=config.protocol,
                device=config.device,
                segment_bytes=config.segment_bytes,
                local_buffer_bytes=0,
                threads=config.threads,
            )
        )
        self._windows = Windows(self._link)
        self._lost = RecentlyUnreadable(config.lost_seconds)
        self._tally = Tally()
        self._lock = threading.Lock()
        self._staging: tuple[StoreStaging, int] | None = None
        self._closed = False
        if not self._link.wait_ready(config.start_timeout):
            logger.warning("storage 'mooncake': %s; going on without it until it answers", self._link.down().message)

    def register(self, memory: Sequence[MemoryRange]) -> None:
        self._windows.add(memory)

    def unregister(self, memory: Sequence[MemoryRange]) -> None:
        self._windows.remove(memory)

    def count_leading(self, keys: Sequence[str], timeout: float) -> int:
        return leading_pages(self.contains, keys, timeout)

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        check_keys(keys)
        deadline = time.monotonic() + timeout
        there: list[bool] = []
        for first in range(0, len(keys), _MOST_IN_CALL):
            part = keys[first : first + _MOST_IN_CALL]
            for key, code in zip(part, self._ask("exist", self._stored(part), deadline).codes, strict=True):
                if code < 0:
                    raise StorageDown(result_of(code).detail, self._config.master)
                there.append(code == EXISTS and key not in self._lost)
        return there

    def read(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        check_batch(keys, pages)
        return self._tally.read(self._move("get", keys, pages, time.monotonic() + timeout))

    def write(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        check_batch(keys, pages)
        return self._tally.write(self._move("put", keys, pages, time.monotonic() + timeout))

    def delete(self, keys: Sequence[str], timeout: float) -> int:
        check_keys(keys)
        if not keys:
            return 0
        return self._ask("remove", self._stored(keys), time.monotonic() + timeout).codes.count(0)

    def clear(self, prefix: str = "", timeout: float = 60.0) -> int:
        if not self._prefix and not prefix:
            raise InvalidRequest.of("namespace", "", "not empty for clear(): it would drop the pages of all others too")
        pattern = f"^{re.escape(self._prefix + prefix)}.*"
        code = self._ask("clear", [pattern], time.monotonic() + timeout).codes[0]
        if code < 0:
            raise StorageDown(result_of(code).detail, self._config.master)
        return code

    def count(self, prefix: str, timeout: float) -> None:
        """Its client lists no keys."""

    def on_removed(self, removed: Removed) -> None:
        """The Store drops pages by itself, and does not say which."""

    def stats(self) -> StorageStats:
        return self._tally.stats(healthy=self._link.ready, detail=self._link.detail)

    def close(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        self._closed = True
        ended = self._link.close(timeout)
        with self._lock:
            if self._staging is not None and self._staging[0].free(deadline - time.monotonic()):
                self._staging = None
            return ended and self._staging is None and self._tally.idle(0.0)

    def _stored(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]

    def _ask(self, what: str, keys: list[str], deadline: float) -> Reply:
        """The reply to a call that moves no pages. Raises StorageDown, also when it comes too late."""
        with asking():
            return self._reply(what, keys, deadline)

    def _reply(self, what: str, keys: list[str], deadline: float) -> Reply:
        pending = self._link.call(what, keys, deadline)
        reply = pending.wait()
        if reply is None and pending.ended.is_set():
            raise self._link.down()
        if reply is None or EXPIRED in reply.codes:
            raise StorageDown(f"Mooncake Store at {self._config.master} did not answer in time", self._config.master)
        if reply.error or not MASTER_DOWN.isdisjoint(reply.codes):
            raise StorageDown(f"Mooncake Store: {reply.error or 'the master does not answer'}", self._config.master)
        return reply

    def _move(self, what: str, keys: Sequence[str], pages: Sequence[PageBuffers], deadline: float) -> list[PageResult]:
        """Moves pages: those in memory that the other process sees at once, the rest through the staging memory."""
        if time.monotonic() >= deadline:
            return [timed_out("not begun in time")] * len(keys)
        results: dict[int, PageResult] = {}
        direct: dict[int, list[tuple[int, int, int]]] = {}
        staged: list[int] = []
        for number, (key, page) in enumerate(zip(keys, pages, strict=True)):
            if key in self._lost:
                results[number] = failed("its owner did not answer a moment ago", retryable=True)
            elif (pieces := self._windows.find(page)) is not None:
                direct[number] = pieces
            else:
                staged.append(number)
        try:
            for part in _parts(list(direct), pages):
                if time.monotonic() >= deadline:
                    break
                try:
                    pending = self._call(what, keys, part, [direct[number] for number in part], deadline)
                except NotShared:  # unregistered meanwhile
                    staged += part
                    continue
                results.update(self._results(what, pending, keys, pages, part, pending.ended))
            while staged and time.monotonic() < deadline:
                done = self._move_staged(what, keys, pages, staged, deadline)
                results.update(done)
                staged = staged[len(done) :]
        except StorageDown as error:
            down = failed(error.message, retryable=True)
            return [results.get(number, down) for number in range(len(keys))]
        except MemoryError as error:
            return [results.get(number, failed(f"no staging memory: {error}")) for number in range(len(keys))]
        return [results.get(number, timed_out("not begun in time")) for number in range(len(keys))]

    def _call(self, what: str, keys: Sequence[str], numbers: list[int], buffers: Buffers, deadline: float) -> Pending:
        return self._link.call(what, self._stored([keys[number] for number in numbers]), deadline, buffers)

    def _move_staged(
        self, what: str, keys: Sequence[str], pages: Sequence[PageBuffers], numbers: list[int], deadline: float
    ) -> dict[int, PageResult]:
        """Moves as many pages as the staging memory takes at once, from the first of ``numbers`` on; one at least."""
        staging, area = self._staged_through()
        if page_bytes(pages[numbers[0]]) > staging.lane_bytes:
            least = page_bytes(pages[numbers[0]]) * self._config.threads
            return {numbers[0]: failed(f"the staging memory is too small for this page: set staging_bytes to {least}")}
        lane = staging.acquire(deadline - time.monotonic())
        if lane is None:
            return {number: timed_out("not begun in time: all staging memory is in use") for number in numbers}
        offsets = staging.place(lane, [pages[number] for number in numbers])
        numbers = numbers[: len(offsets)]
        pending: Pending | None = None
        try:
            if what == "put":
                self._each(staging.fill, offsets, pages, numbers)
            sizes = [page_bytes(pages[number]) for number in numbers]
            buffers = [[(area, offset, size)] for offset, size in zip(offsets, sizes, strict=True)]
            pending = self._call(what, keys, numbers, buffers, deadline)
            results = self._results(what, pending, keys, pages, numbers, None)
            if what == "get":
                came = [place for place, number in enumerate(numbers) if results[number].ok]
                self._each(staging.empty, [offsets[place] for place in came], pages, [numbers[place] for place in came])
            return results
        finally:
            _release(staging, lane, pending)

    @staticmethod
    def _each(
        copy: Callable[[int, PageBuffers], None],
        offsets: Sequence[int],
        pages: Sequence[PageBuffers],
        numbers: Sequence[int],
    ) -> None:
        for offset, number in zip(offsets, numbers, strict=True):
            copy(offset, pages[number])

    def _results(
        self,
        what: str,
        pending: Pending,
        keys: Sequence[str],
        pages: Sequence[PageBuffers],
        numbers: list[int],
        released: threading.Event | None,
    ) -> dict[int, PageResult]:
        """``released``: what ends the other process's hold on the pages, if they are not answered in time."""
        reply = pending.wait()
        if reply is None:
            if pending.ended.is_set():
                raise self._link.down()
            return dict.fromkeys(numbers, timed_out("the Store did not answer in time", released))
        if reply.error:
            return dict.fromkeys(numbers, failed(f"Mooncake Store: {reply.error}", retryable=True))
        read = self._read_result if what == "get" else self._write_result
        codes = zip(numbers, reply.codes, reply.sizes, strict=True)
        return {number: read(keys[number], page_bytes(pages[number]), code, size) for number, code, size in codes}

    def _read_result(self, key: str, wanted: int, code: int, there: int) -> PageResult:
        if code == EXPIRED:
            return timed_out("not begun in time")
        if code >= 0:
            return OK if code == wanted else MISSING
        if there and there != wanted:
            return MISSING
        if is_lost(code):
            self._lost.add(key)
        return result_of(code)

    def _write_result(self, key: str, wanted: int, code: int, there: int) -> PageResult:
        if code == EXPIRED:
            return timed_out("not begun in time")
        if code == EXISTS:
            return OK if there in (0, wanted) else failed(other_size(key, there, wanted))
        if code == 0:
            self._tally.add("written")
            return OK
        return result_of(code)

    def _staged_through(self) -> tuple[StoreStaging, int]:
        """The staging memory and its area. Raises StorageDown when closed, MemoryError."""
        with self._lock:
            if self._closed:
                raise self._link.down()
            if self._staging is None:
                staging = StoreStaging(self._config.staging_bytes, self._config.threads)
                area = self._windows.share(staging.segment.address, staging.segment.nbytes)
                self._staging = staging, area
                logger.info("storage 'mooncake': pages are copied through %d bytes", self._config.staging_bytes)
            return self._staging


def _parts(numbers: list[int], pages: Sequence[PageBuffers]) -> Iterator[list[int]]:
    """Pages of one call: few enough that none of them waits for the others until its lease in the Store has ended."""
    part: list[int] = []
    nbytes = 0
    for number in numbers:
        nbytes += page_bytes(pages[number])
        if part and (nbytes > _MOST_BYTES_IN_CALL or len(part) == _MOST_IN_CALL):
            yield part
            part, nbytes = [], page_bytes(pages[number])
        part.append(number)
    if part:
        yield part


def _release(staging: StoreStaging, lane: StoreLane, pending: Pending | None) -> None:
    """A lane that the other process may still use is free when it does not."""
    if pending is None:
        staging.release(lane)
    else:
        pending.then(lambda: staging.release(lane))
