"""The load that a rank says each second: what the engine told it, and what its cache lends and takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import EngineLoad


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

    def add_pulls(self, pulls: Callable[[EngineLoad], EngineLoad]) -> None:
        """From now on ``pulls`` adds what the cache lends and takes."""
        self._pulls = pulls

    def now(self) -> EngineLoad | None:
        """Returns what is known; None: nothing is."""
        if self._pulls is None:
            return self._said
        return self._pulls(self._said or EngineLoad())
