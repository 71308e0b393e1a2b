"""Compares what came live with what a late subscriber replays over gRPC, byte for byte, and with the cache itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvgrpc.client import Payloads, SyncClient
from kvgrpc.demo.launch import DemoFailed
from kvgrpc.demo.processes.live_events import LiveEvents
from kvgrpc.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from kvgrpc.events.model import Event

SUBSCRIBED_SECONDS = 10.0
ARRIVED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class EventResult:
    """One stream. ``difference`` says in words what was not equal; "" when everything was."""

    engine: str
    batches: int = 0
    nbytes: int = 0
    stored: int = 0
    removed: int = 0
    difference: str = ""


class EventCheck:
    """Follows the one stream of the rank at ``address`` from now on. ``clear`` makes the rank empty its cache."""

    def __init__(self, address: str, clear: Callable[[], None]) -> None:
        self._address = address
        with SyncClient(address) as client:
            (stream,) = client.list_streams()
        self._engine = stream.engine
        self._live = LiveEvents(stream.pub_endpoint)
        if not self._live.heard(clear, SUBSCRIBED_SECONDS):
            raise DemoFailed(f"no live event of {self._engine} came from {stream.pub_endpoint}")

    def result(self, cached: Iterable[int]) -> EventResult:
        """Returns what the comparison says, now that the rank holds the pages ``cached`` and publishes nothing more."""
        live = self._live.up_to(self._next_sequence() - 1, ARRIVED_SECONDS)
        replayed = self._replay(min(live))
        payloads = list(replayed.values())
        events = [event for payload in payloads for event in decode_batch(payload).events]
        return EventResult(
            self._engine,
            len(payloads),
            sum(map(len, payloads)),
            sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored)),
            sum(len(event.block_hashes) for event in events if isinstance(event, BlockRemoved)),
            self._difference(live, replayed, _cached_after(events), set(cached)),
        )

    def close(self) -> None:
        self._live.close()

    def _next_sequence(self) -> int:
        with SyncClient(self._address) as client:
            (stream,) = client.list_streams()
        return stream.next_sequence

    def _replay(self, first: int) -> dict[int, bytes]:
        """The late subscriber: everything from ``first`` on, by sequence, over EventService.Watch."""
        with SyncClient(self._address) as client:
            parts = [part for part in client.watch(from_sequence=first) if isinstance(part, Payloads)]
        return {number: payload for part in parts for number, payload in enumerate(part.payloads, part.first_sequence)}

    def _difference(
        self, live: dict[int, bytes], replayed: dict[int, bytes], followed: set[int | bytes], cached: set[int]
    ) -> str:
        if self._live.malformed:
            return f"{self._live.malformed} live messages were not three frames"
        if live.keys() != replayed.keys():
            return f"{len(live)} batches came live, {len(replayed)} were replayed"
        if unequal := [number for number in live if live[number] != replayed[number]]:
            return f"batch {unequal[0]} was replayed with other bytes than it had live"
        if followed != cached:
            return f"the events tell of {len(followed)} cached pages, the cache holds {len(cached)}"
        return ""


def _cached_after(events: Iterable[Event]) -> set[int | bytes]:
    """The pages that a reader of these events takes for cached."""
    cached: set[int | bytes] = set()
    for event in events:
        if isinstance(event, BlockStored):
            cached.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            cached.difference_update(event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            cached.clear()
    return cached
