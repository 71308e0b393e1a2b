"""PrefetchService over a manager: decode the request, call, encode the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

from kvgrpc.errors import (
    FeatureDisabled,
    InvalidRequest,
    PermissionDenied,
    ServerDraining,
    StorageFailed,
    TooManyRequests,
)
from kvgrpc.model import Tier
from kvgrpc.observability.caches import forget_cache, watch_cache
from kvgrpc.paging import numbers_token, page_size, read_numbers_token
from kvgrpc.prefetch import wire
from kvgrpc.prefetch.model import OperationKind
from kvgrpc.prefetch.pins import CallersPins
from kvgrpc.prefetch.protocol.book import MAX_OPEN_PAGES, OperationBook
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.served import ServedCache
from kvgrpc.rpc.blocking import BlockingCalls
from kvgrpc.rpc.callers import caller
from kvgrpc.rpc.security import CallerRole
from kvgrpc.rpc.shares import Shares, TakenShare
from kvgrpc.rpc.turns import next_turn
from kvgrpc.rpc.within import within
from kvgrpc.v1 import prefetch_service_pb2 as pb
from kvgrpc.v1.prefetch_service_pb2_grpc import PrefetchServiceServicer
from kvgrpc.wire import rank_ref_to_pb, seconds_from_pb

MAX_WATCHES = 256
MAX_WATCHED = 1_000
MAX_BLOCKING = 64
MAX_PIN_SECONDS = 3600.0
HEARTBEAT_SECONDS = 1.0
_THREADS = 4
_OPERATIONS_OF_A_MESSAGE = 256
# An operation of 65,536 pages says what became of each; clients of other languages take 4 MiB unless told otherwise.
_BYTES_OF_A_MESSAGE = 1 << 20
# Changes of one operation come in bursts; a watcher needs the latest only.
_COALESCE_SECONDS = 0.02
_ON_THE_LOOP_TOKENS, _ON_THE_LOOP_HASHES = 4_096, 4_096
_STORAGE_SECONDS = 10.0
# A purge may look at every page of a store.
_PURGE_SECONDS = 60.0
_MARGIN_SECONDS = 0.2
T = TypeVar("T")


class PrefetchServicer(PrefetchServiceServicer):
    """Its methods, ``drain`` too, run on one event loop; what may block does so on threads of its own, a bounded
    number."""

    def __init__(self, cache: ServedCache) -> None:
        self._cache = cache
        self._blocking = BlockingCalls("prefetch-call", "calls that ask storage", threads=_THREADS, most=MAX_BLOCKING)
        self._shares = OperationShares(cache.book, cache.limits.operations)
        self._pins = None if cache.pinnable is None else CallersPins(cache.pinnable)
        self._watches: set[asyncio.Event] = set()
        self._draining = False
        watch_cache(cache.use)

    def drain(self) -> None:
        """Ends every watch with ServerDraining; no start is taken from now on."""
        self._draining = True
        self._cache.drain()
        for wake in self._watches:
            wake.set()

    def undrain(self) -> None:
        """Serves watches and takes starts again."""
        self._draining = False
        self._cache.undrain()

    def close(self) -> None:
        """Lets go of the threads; calls that still run on them are left behind."""
        forget_cache(self._cache.use)
        self._blocking.close()
        self._shares.close()
        if self._pins is not None:
            self._pins.close()

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        hashes = await self._hashes(request.pages)
        storage = not request.without_storage
        seconds = _seconds_left(context)
        device, near, far = await self._block(
            lambda: self._cache.lookup(hashes, seconds, extra_key=request.pages.extra_key, storage=storage)
        )
        return pb.LookupResponse(
            asked_pages=len(hashes),
            device_pages=device,
            host_pages=near,
            storage_pages=far,
            page_tokens=self._cache.namespace.page_tokens,
        )

    async def StartPrefetch(self, request: pb.StartPrefetchRequest, context: Any) -> pb.StartPrefetchResponse:
        return pb.StartPrefetchResponse(operation=await self._start(OperationKind.PREFETCH, request))

    async def StartBackup(self, request: pb.StartBackupRequest, context: Any) -> pb.StartBackupResponse:
        return pb.StartBackupResponse(operation=await self._start(OperationKind.BACKUP, request))

    async def _start(
        self, kind: OperationKind, request: pb.StartPrefetchRequest | pb.StartBackupRequest
    ) -> pb.CacheOperation:
        order = wire.order_from_pb(kind, request, await self._hashes(request.pages))
        if len(order.hashes) > _ON_THE_LOOP_HASHES:
            await next_turn()
        if self._cache.began(kind, order.request_id) is not None:
            return self._to_pb(self._cache.start(order))
        return self._to_pb(self._shares.begin(len(order.hashes), lambda: self._cache.start(order)))

    async def TerminatePrefetch(
        self, request: pb.TerminatePrefetchRequest, context: Any
    ) -> pb.TerminatePrefetchResponse:
        operation = self._cache.book.get(request.operation_id)
        _check_owner(operation)
        with self._listening(operation) as wake:
            self._cache.terminate(operation)
            end = time.monotonic() + _seconds_left(context)
            while not operation.ended and time.monotonic() < end:
                await _wait(wake, end - time.monotonic())
        return pb.TerminatePrefetchResponse(operation=self._to_pb(operation))

    async def WatchOperations(
        self, request: pb.WatchOperationsRequest, context: Any
    ) -> AsyncIterator[pb.WatchOperationsResponse]:
        book = self._cache.book
        if len(request.operation_ids) > MAX_WATCHED:
            text = f"{len(request.operation_ids)} operations"
            raise InvalidRequest.of("operation_ids", text, f"at most {MAX_WATCHED}, or none for all")
        named = [book.get(each) for each in request.operation_ids]
        with self._listening() as wake:
            seen = book.revision
            wanted = {operation.operation_id for operation in named}
            # Those that were told of, and not of their end.
            left: dict[str, Operation] = {}
            for message in self._chunks(named or (book.open() if request.open_only else book.all()), left):
                yield message
            yield pb.WatchOperationsResponse(complete=True)
            while left or not wanted:
                woken = await _wait(wake, HEARTBEAT_SECONDS)
                if self._draining:
                    raise ServerDraining("the rank drains; ask again elsewhere", retry_after=1.0)
                await asyncio.sleep(_COALESCE_SECONDS if woken else 0)
                seen, before = book.revision, seen
                changed = [each for each in book.changed_since(before) if not wanted or each.operation_id in wanted]
                known = {each.operation_id for each in changed}
                # The book may have forgotten one since it ended.
                changed += [each for each in left.values() if each.ended and each.operation_id not in known]
                for message in self._chunks(changed, left):
                    yield message
                if not woken:
                    yield pb.WatchOperationsResponse()

    async def ListOperations(self, request: pb.ListOperationsRequest, context: Any) -> pb.ListOperationsResponse:
        book = self._cache.book
        question = f"operations {request.open_only}"
        after = read_numbers_token(question, request.page_token, 1)
        rows = book.open() if request.open_only else book.all()
        rows = sorted((row for row in rows if after is None or row.number > after[0]), key=lambda row: row.number)
        response, left = pb.ListOperationsResponse(), _BYTES_OF_A_MESSAGE
        for row in rows[: page_size(request.page_size)]:
            message = self._to_pb(row, with_pages=False)
            left -= message.ByteSize()
            if left < 0 and response.operations:
                break
            response.operations.append(message)
        told = len(response.operations)
        if told < len(rows):
            response.next_page_token = numbers_token(question, [rows[told - 1].number])
        return response

    async def GetCacheInfo(self, request: pb.GetCacheInfoRequest, context: Any) -> pb.GetCacheInfoResponse:
        cache, limits = self._cache, self._cache.limits
        uses = await self._block(cache.use)
        facts = cache.facts()
        response = pb.GetCacheInfoResponse(
            rank=rank_ref_to_pb(cache.rank),
            cache_namespace=wire.namespace_to_pb(cache.namespace),
            tiers=[wire.use_to_pb(use) for use in uses],
            write_policy=facts.write_policy,
            stop_policy=facts.stop_policy,
            occupied_pages=facts.occupied,
            occupied_limit=facts.capacity,
            threshold_tokens=limits.threshold_tokens,
            open_operations=len(cache.book.open()),
            agreeing_ranks=facts.agreeing_ranks,
        )
        if facts.storage:
            response.storage_backend = facts.storage
            response.storage_healthy = facts.storage_healthy
            response.storage_detail = facts.storage_detail
        return response

    async def PurgePages(self, request: pb.PurgePagesRequest, context: Any) -> pb.PurgePagesResponse:
        mine = wire.namespace_to_pb(self._cache.namespace)
        if request.cache_namespace != mine:
            theirs = _one_line(request.cache_namespace)
            raise InvalidRequest.of("cache_namespace", theirs, f"this cache's, {_one_line(mine)}")
        tiers = wire.tiers_from_pb(list(request.tiers))
        extra_key = request.extra_key if request.HasField("extra_key") else None
        seconds, dry_run = _seconds_left(context, _PURGE_SECONDS), request.dry_run
        purged = await self._block(lambda: self._cache.purge(tiers, extra_key, dry_run=dry_run, timeout=seconds))
        return pb.PurgePagesResponse(
            device_pages=purged.near.get(Tier.DEVICE, 0),
            host_pages=purged.near.get(Tier.HOST, 0),
            storage_pages=purged.storage,
            kept_pages=purged.kept,
            storage_known_only=purged.known_only,
        )

    async def PinPages(self, request: pb.PinPagesRequest, context: Any) -> pb.PinPagesResponse:
        seconds = seconds_from_pb("duration", request.duration, MAX_PIN_SECONDS)
        hashes = await self._hashes(request.pages)
        pinned = await self._pin(hashes, seconds)
        response = pb.PinPagesResponse(pinned_pages=pinned)
        response.until.FromMicroseconds(round((time.time() + seconds) * 1e6))
        return response

    async def _pin(self, hashes: Sequence[str], seconds: float) -> int:
        def pin(those: Sequence[str]) -> Awaitable[int]:
            return self._block(lambda: self._cache.pin(those, seconds))

        def count_near() -> Awaitable[int]:
            return self._block(lambda: self._cache.lookup(hashes, _STORAGE_SECONDS, storage=False)[1])

        if self._pins is None:
            return await pin(hashes)
        if not seconds:
            ended = await pin(hashes)
            self._pins.ended(hashes)
            return ended
        return await self._pins.pin(hashes, seconds, count_near, pin)

    async def JoinAgreement(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.JoinAgreementRequest], context: Any
    ) -> None:
        leader = self._cache.leader
        if leader is None:
            raise FeatureDisabled(
                f"{self._cache.rank} leads no replica of several ranks",
                metadata={"feature": "rank agreement", "howToEnable": "dial the rank with pp = cp = tp = 0"},
            )
        await leader.serve(context, self._cache.role)

    async def _hashes(self, pages: pb.PromptPages) -> tuple[str, ...]:
        page_tokens = self._cache.namespace.page_tokens
        if len(pages.tokens) <= _ON_THE_LOOP_TOKENS and len(pages.page_hashes) <= _ON_THE_LOOP_HASHES:
            return wire.pages_from_pb(pages, page_tokens, self._cache.hash_tokens)
        return await self._block(lambda: wire.pages_from_pb(pages, page_tokens, self._cache.hash_tokens))

    async def _block(self, call: Callable[[], T]) -> T:
        """Runs it on one of the threads; what a backend raises that is none of ours is STORAGE_FAILED."""
        try:
            return await self._blocking.run(call)
        except OSError as error:
            name = self._cache.facts().storage or "storage"
            text = f"{name}: {type(error).__name__}: {error}"
            raise StorageFailed(text, metadata={"backend": name, "status": "FAILED"}) from error

    def _to_pb(self, operation: Operation, *, with_pages: bool = True) -> pb.CacheOperation:
        return wire.operation_to_pb(self._cache.book.row(operation, with_pages=with_pages), time.time())

    def _chunks(
        self, operations: Sequence[Operation], left: dict[str, Operation]
    ) -> Iterator[pb.WatchOperationsResponse]:
        """Page by page only for what has ended: what runs is told many times. ``left`` has those that go on."""
        message, room = pb.WatchOperationsResponse(), _BYTES_OF_A_MESSAGE
        for each in operations:
            row = self._to_pb(each, with_pages=each.ended)
            if row.quiescent:
                left.pop(each.operation_id, None)
            else:
                left[each.operation_id] = each
            room -= row.ByteSize()
            if message.operations and (room < 0 or len(message.operations) == _OPERATIONS_OF_A_MESSAGE):
                yield message
                message, room = pb.WatchOperationsResponse(), _BYTES_OF_A_MESSAGE - row.ByteSize()
            message.operations.append(row)
        if message.operations:
            yield message

    def _listening(self, only: Operation | None = None) -> _Listening:
        # Whoever ends an operation waits a bounded time for it: watchers do not lock them out.
        if only is None and len(self._watches) >= MAX_WATCHES:
            raise TooManyRequests(
                f"{len(self._watches)} watches are served already",
                metadata={"limit": MAX_WATCHES, "value": len(self._watches) + 1, "scope": "watches of operations"},
                retry_after=1.0,
            )
        return _Listening(self._cache, self._watches, only)


class _Listening:
    """An event of this loop that changes of operations set, from whatever thread."""

    def __init__(self, cache: ServedCache, watches: set[asyncio.Event], only: Operation | None) -> None:
        self._book = cache.book
        self._watches = watches
        self._only = only
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._end: Callable[[], None] | None = None

    def __enter__(self) -> asyncio.Event:
        self._end = self._book.listen(self._changed)
        self._watches.add(self._wake)
        return self._wake

    def __exit__(self, *_: object) -> None:
        self._watches.discard(self._wake)
        if self._end is not None:
            self._end()

    def _changed(self, operation: Operation) -> None:
        if self._only is None or operation is self._only:
            self._loop.call_soon_threadsafe(self._wake.set)


async def _wait(wake: asyncio.Event, seconds: float) -> bool:
    try:
        await within(seconds, wake.wait())
    except asyncio.TimeoutError:
        return False
    wake.clear()
    return True


def _check_owner(operation: Operation) -> None:
    """Only who began an operation may end it, and people. Raises PermissionDenied."""
    known, path = caller(), "/kvgrpc.v1.PrefetchService/TerminatePrefetch"
    if known.role is None or known.role is CallerRole.OPERATOR:
        return
    if operation.owner != known.name:
        raise PermissionDenied(
            f"{operation.operation_id} is of another caller: it may be ended by that one, or by an operator",
            metadata={"method": path, "role": known.role.value, "allowed": "operator, its own caller"},
        )


def _seconds_left(context: Any, most: float = _STORAGE_SECONDS) -> float:
    """Returns the seconds a call may take: a little less than its own deadline, so that the answer still arrives."""
    left = context.time_remaining()
    return most if left is None else max(0.01, min(most, left - _MARGIN_SECONDS))


def _one_line(namespace: pb.CacheNamespace) -> str:
    return f"{namespace.model} {namespace.dtype} {namespace.layout} {namespace.page_tokens}"


class OperationShares:
    """Callers together have half of the operations and of their pages, the engine's own have the rest at least.

    ``operations``: how many the book holds that have not ended. Belongs to one event loop.
    """

    def __init__(self, book: OperationBook, operations: int) -> None:
        self._operations = Shares(max(1, operations // 2), "cache operations", connections=False)
        self._pages = Shares(MAX_OPEN_PAGES // 2, "pages of cache operations", connections=False)
        self._taken: dict[str, tuple[TakenShare, TakenShare]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_listening = book.listen(self._changed)

    def begin(self, pages: int, start: Callable[[], Operation]) -> Operation:
        """Begins what ``start`` does, as the caller's operation. Raises TooManyRequests, and what ``start`` raises."""
        self._loop = asyncio.get_running_loop()
        self._pages.check(pages)
        taken = self._operations.take(), self._pages.take(pages)
        try:
            operation = start()
        except BaseException:
            self._give_back(taken)
            raise
        if operation.operation_id in self._taken:  # it was there already
            self._give_back(taken)
            return operation
        operation.owner = caller().name
        self._taken[operation.operation_id] = taken
        if operation.ended:
            self._end(operation.operation_id)
        return operation

    def close(self) -> None:
        self._stop_listening()

    def _changed(self, operation: Operation) -> None:
        """On the thread that changed it."""
        if operation.ended and operation.operation_id in self._taken and self._loop is not None:
            self._loop.call_soon_threadsafe(self._end, operation.operation_id)

    def _end(self, operation_id: str) -> None:
        taken = self._taken.pop(operation_id, None)
        if taken is not None:
            self._give_back(taken)

    def _give_back(self, taken: tuple[TakenShare, TakenShare]) -> None:
        self._operations.give_back(taken[0])
        self._pages.give_back(taken[1])
