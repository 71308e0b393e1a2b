"""The load that is said beside events each second: what the engine told, and what its cache lends and takes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakValueDictionary

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import EngineLoad, RankId


class RankLoad:
    """``rank.load.say(...)``, from any thread, as often as the engine likes: readers of the rank's events hear the last
    word each second, and plans of an index rest on it."""

    def __init__(self, said: EngineLoad | None = None) -> None:
        self._said = said
        self._pulls: Callable[[EngineLoad], EngineLoad] | None = None

    def say(self, *, prefill_tokens_per_second: float | None = None, waiting_tokens: int | None = None) -> None:
        """Takes what the engine knows of itself; None: as before. Raises InvalidRequest for none, or one below 0."""
        said = self._said or EngineLoad()
        if prefill_tokens_per_second is not None:
            if not 0 <= prefill_tokens_per_second < math.inf:
                raise InvalidRequest.of("prefill_tokens_per_second", prefill_tokens_per_second, "0 or more")
            said = replace(said, prefill_tokens_per_second=float(prefill_tokens_per_second))
        if waiting_tokens is not None:
            if not 0 <= waiting_tokens < 2**64:
                raise InvalidRequest.of("waiting_tokens", waiting_tokens, "0 to 2^64-1")
            said = replace(said, waiting_tokens=int(waiting_tokens))
        self._said = said

    @property
    def prefill_tokens_per_second(self) -> float:
        """The speed that the engine told; 0: it told none."""
        said = self._said
        return 0.0 if said is None else said.prefill_tokens_per_second

    def add_pulls(self, pulls: Callable[[EngineLoad], EngineLoad] | None) -> None:
        """From now on ``pulls`` adds what the cache lends and takes; None: it does neither any more."""
        self._pulls = pulls

    def now(self) -> EngineLoad | None:
        """Returns what is known; None: nothing is."""
        if self._pulls is None:
            return self._said
        return self._pulls(self._said or EngineLoad())


def load_of(rank: RankId) -> RankLoad:
    """The load of one cache of an engine, the same for all servers of this process: engines that are no rank of ours
    have their events served by one and their host cache by another. It lasts as long as somebody keeps it."""
    with _lock:
        found = _of_process.get((rank.engine, rank.dp))
        if found is None:
            found = _of_process[rank.engine, rank.dp] = RankLoad()
        return found


_lock = threading.Lock()
_of_process: WeakValueDictionary[tuple[str, int], RankLoad] = WeakValueDictionary()
