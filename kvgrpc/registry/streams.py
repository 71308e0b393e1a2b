"""Says for an operator which READY engines lack the event stream of a dp rank: a line in the log, and a gauge."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvgrpc.observability import metrics
from kvgrpc.observability.logging import RateLimited
from kvgrpc.registry.model import EngineChange

_log = logging.getLogger(__name__)


class MissingStreams:
    """Holds an entry for each engine that lacks one, as long as the engine is there. Not thread-safe.

    An engine that is not READY for a while keeps its entry: a rank that is replaced must not repeat the line.
    """

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, ...]] = {}
        self._lines = RateLimited(_log)

    def heed(self, changes: Iterable[EngineChange]) -> None:
        """Looks at engines that changed. One line when what an engine lacks is new, one when it lacks nothing more."""
        for change in changes:
            engine, told = change.engine, self._told.get(change.engine.name, ())
            if not engine.registered_ranks:
                self._told.pop(engine.name, None)
            elif engine.ready and engine.dp_lacking_events != told:
                self._tell(engine.name, engine.dp_lacking_events)
        metrics.REGISTRY_STREAMS_MISSING.set(sum(map(len, self._told.values())))

    def _tell(self, engine: str, lacking: tuple[int, ...]) -> None:
        if not lacking:
            del self._told[engine]
            text = f"{engine}: every dp rank has its stream of events now"
            self._lines.say(logging.INFO, "engines that have all streams", text)
            return
        self._told[engine] = lacking
        told = f"{engine} is READY, but its dp {', '.join(map(str, lacking))} publishes no events"
        text = f"{told} though others of it do: no router knows what it caches"
        self._lines.warning("engines that lack streams", text)
