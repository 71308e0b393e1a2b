"""EventService: find the stream, admit the reader, say what ``watch`` says."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvgrpc.errors import StreamNotFound, TooManyRequests, Violation
from kvgrpc.events.log.journal import Batches, DroppedRange
from kvgrpc.events.log.stream import EventStream
from kvgrpc.events.notifier import Notifier
from kvgrpc.events.watch import Part, SnapshotPart, WatchBegins, WatchMode, watch
from kvgrpc.events.wire import order_from_pb, part_to_pb, stream_to_pb
from kvgrpc.model import EngineLoad, raise_if
from kvgrpc.observability import metrics
from kvgrpc.paging import page_size, page_token, read_page_token
from kvgrpc.rpc.callers import NewsReader, Who, who
from kvgrpc.v1 import event_service_pb2 as pb
from kvgrpc.v1.event_service_pb2_grpc import EventServiceServicer

MAX_WATCHES = 4096
HEARTBEAT_SECONDS = 1.0
RETRY_SECONDS = 1.0
_SHOWN_STREAMS = 4
_METHOD = "/kvgrpc.v1.EventService/Watch"


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
        self._readers: dict[_Reader, None] = {}
        self._draining = False

    @property
    def watches(self) -> int:
        """Readers that are served now."""
        return len(self._readers)

    def readers(self) -> Iterator[NewsReader]:
        """Each with the batches that it was not sent yet."""
        return (reader.news() for reader in self._readers)

    def drain(self) -> None:
        """Ends every Watch that would not end by itself, now and from now on, with ServerDraining."""
        self._draining = True
        for notifier in self._notifiers.values():
            notifier.notify()

    def undrain(self) -> None:
        """Serves Watches again; those that a drain ended stay ended."""
        self._draining = False

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
        with self._admitted(stream, order.mode) as reader, self._notifier(stream, order.mode) as notifier:
            async for part in watch(
                stream, order, notifier, self._heartbeat_seconds, lambda: self._draining, self._load
            ):
                # Reading payloads takes tens of milliseconds, and rooms live on this loop too.
                yield await asyncio.to_thread(part_to_pb, part, form) if form.typed else part_to_pb(part, form)
                reader.heed(part)

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
    def _admitted(self, stream: EventStream, mode: WatchMode) -> Iterator[_Reader]:
        if self.watches >= self._max_watches:
            raise TooManyRequests(
                f"{self.watches} readers are served already",
                metadata={"limit": self._max_watches, "value": self.watches + 1, "scope": "watches"},
                retry_after=RETRY_SECONDS,
            )
        reader = _Reader(stream, mode)
        self._readers[reader] = _OF_THIS_PROCESS[reader] = None
        metrics.EVENT_WATCH_READERS.inc()
        try:
            yield reader
        finally:
            del self._readers[reader], _OF_THIS_PROCESS[reader]
            metrics.EVENT_WATCH_READERS.dec()

    def _notifier(self, stream: EventStream, mode: WatchMode) -> AbstractContextManager[Notifier]:
        # Who takes no batches need not wake for each.
        heartbeat_only = mode is WatchMode.HEARTBEAT
        notifier = self._notifiers.setdefault((stream.engine, stream.dp, heartbeat_only), Notifier())
        return notifier.attached(stream.listen_for_end if heartbeat_only else stream.listen)


@dataclass(slots=True, eq=False)
class _Reader:
    """A Watch: its reader, and the sequence that it is sent next; None: it takes none, or a snapshot first."""

    stream: EventStream
    mode: WatchMode
    next_sequence: int | None = None
    caller: Who = field(default_factory=who)
    since: float = field(default_factory=time.time)

    def heed(self, part: Part) -> None:
        """It was sent that."""
        if isinstance(part, Batches | DroppedRange):
            self.next_sequence = part.last + 1
        elif isinstance(part, SnapshotPart):
            self.next_sequence = part.snapshot.next_sequence if part.last else None
        elif isinstance(part, WatchBegins) and self.mode in (WatchMode.REPLAY, WatchMode.TAIL):
            self.next_sequence = part.first

    @property
    def behind(self) -> int | None:
        """Batches that it was not sent yet."""
        upcoming = self.next_sequence
        return None if upcoming is None else max(0, self.stream.next_sequence - upcoming)

    def news(self) -> NewsReader:
        return NewsReader(self.caller, _METHOD, self.since, self.behind, self.stream.engine, self.stream.dp)


# For a scraper, which reads them on a thread of its own.
_OF_THIS_PROCESS: dict[_Reader, None] = {}
metrics.EVENT_WATCH_LAG.set_function(lambda: max((reader.behind or 0 for reader in list(_OF_THIS_PROCESS)), default=0))
