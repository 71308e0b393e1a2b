"""EventService: find the stream, admit the reader, say what ``watch`` says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from kvgrpc.errors import StreamNotFound, TooManyRequests, Violation
from kvgrpc.events.log.stream import EventStream
from kvgrpc.events.notifier import Notifier
from kvgrpc.events.watch import WatchMode, watch
from kvgrpc.events.wire import order_from_pb, part_to_pb, stream_to_pb
from kvgrpc.model import EngineLoad, raise_if
from kvgrpc.observability import metrics
from kvgrpc.paging import page_size, page_token, read_page_token
from kvgrpc.v1 import event_service_pb2 as pb
from kvgrpc.v1.event_service_pb2_grpc import EventServiceServicer

MAX_WATCHES = 4096
HEARTBEAT_SECONDS = 1.0
RETRY_SECONDS = 1.0
_SHOWN_STREAMS = 4


class EventServicer(EventServiceServicer):
    """Serves the streams of this process. Its methods, ``drain`` too, run on one event loop."""

    def __init__(
        self,
        streams: Sequence[EventStream],
        *,
        max_watches: int = MAX_WATCHES,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        load: Callable[[], EngineLoad | None] = lambda: None,
    ) -> None:
        """``load``: what the engine has to do, told with each heartbeat."""
        self._load = load
        self._streams = {(stream.engine, stream.dp): stream for stream in streams}
        self._notifiers: dict[tuple[str, int, bool], Notifier] = {}
        self._max_watches = max_watches
        self._heartbeat_seconds = heartbeat_seconds
        self._watches = 0
        self._draining = False

    @property
    def watches(self) -> int:
        """Readers that are served now."""
        return self._watches

    def drain(self) -> None:
        """Ends every Watch that would not end by itself, now and from now on, with ServerDraining."""
        self._draining = True
        for notifier in self._notifiers.values():
            notifier.notify()

    async def ListStreams(self, request: pb.ListStreamsRequest, context: Any) -> pb.ListStreamsResponse:
        after = read_page_token("ListStreams", request.page_token)
        size = page_size(request.page_size)
        # Six digits order dp as a number.
        names = sorted((f"{engine}/{dp:06}", (engine, dp)) for engine, dp in self._streams)
        rest = [(name, key) for name, key in names if name > after]
        page = rest[:size]
        return pb.ListStreamsResponse(
            streams=[stream_to_pb(self._streams[key].state()) for _, key in page],
            next_page_token=page_token("ListStreams", page[-1][0]) if len(rest) > size else "",
        )

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        stream, (order, form) = self._find(request), order_from_pb(request)
        with self._admitted(), self._notifier(stream, order.mode) as notifier:
            async for part in watch(
                stream, order, notifier, self._heartbeat_seconds, lambda: self._draining, self._load
            ):
                # Reading payloads takes tens of milliseconds, and rooms live on this loop too.
                yield await asyncio.to_thread(part_to_pb, part, form) if form.typed else part_to_pb(part, form)

    def _find(self, request: pb.WatchRequest) -> EventStream:
        key = (request.engine, request.dp)
        if not request.engine and self._streams:
            if len(self._streams) > 1:
                raise_if([Violation("engine", "named, because this process publishes several streams", "")])
            only = next(iter(self._streams.values()))
            # dp 0 is also what was left out.
            key = (only.engine, request.dp or only.dp)
        if key not in self._streams:
            engine, dp = key
            raise StreamNotFound(
                f"no event stream of engine {engine!r} dp {dp} here, {self._what_is_here()}",
                metadata={"engine": request.engine, "dp": request.dp},
            )
        return self._streams[key]

    def _what_is_here(self) -> str:
        if not self._streams:
            return "and no other: ask its rank with pp, cp, tp = 0"
        shown = [f"{engine} dp {dp}" for engine, dp in itertools.islice(self._streams, _SHOWN_STREAMS)]
        more = len(self._streams) - len(shown)
        return f"but {', '.join(shown)}{f' and {more} more' if more else ''}"

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._watches >= self._max_watches:
            raise TooManyRequests(
                f"{self._watches} readers are served already",
                metadata={"limit": self._max_watches, "value": self._watches + 1, "scope": "watches"},
                retry_after=RETRY_SECONDS,
            )
        self._watches += 1
        metrics.EVENT_WATCH_READERS.inc()
        try:
            yield
        finally:
            self._watches -= 1
            metrics.EVENT_WATCH_READERS.dec()

    def _notifier(self, stream: EventStream, mode: WatchMode) -> AbstractContextManager[Notifier]:
        # Who takes no batches need not wake for each.
        heartbeat_only = mode is WatchMode.HEARTBEAT
        notifier = self._notifiers.setdefault((stream.engine, stream.dp, heartbeat_only), Notifier())
        return notifier.attached(stream.listen_for_end if heartbeat_only else stream.listen)
