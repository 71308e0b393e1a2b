"""A bounded number of places that many callers take from: of all of them, and of one."""

from __future__ import annotations

from collections import Counter

from kvgrpc.errors import TooManyRequests
from kvgrpc.rpc.callers import caller

# When whoever is refused a place may ask again: most are taken for less, and asking costs both sides a call.
RETRY_SECONDS = 1.0


class Shares:
    """Who has how many places. Lives on one event loop.

    ``limit``: places there are; ``scope`` says of what, in a refusal, and ``setting`` which setting is the limit, where
    one is.

    One caller (``Caller.name``) may have as many as it leaves to others: half of the limit where it is alone, half of
    what is left where others are. A thousand ranks that share a token, or come through one proxy, are one caller: a
    fixed share that is enough for them would let two or three take all, and this takes a dozen.
    """

    def __init__(self, limit: int, scope: str, setting: str = "") -> None:
        self._limit = limit
        self._scope = scope
        self._setting = f"; its {setting} is the bound" if setting else ""
        self._of_callers: Counter[str] = Counter()
        self.count = 0

    def take(self, places: int = 1) -> str:
        """For the caller of the call that runs now; returns its name, for ``give_back``.

        Raises TooManyRequests past the limit or the caller's share of it.
        """
        name = caller().name
        free, own = self._limit - self.count, self._of_callers[name]
        if places > free:
            raise self._too_many(
                f"{self.count} {self._scope} are there already, {self._limit} are the most",
                self._limit,
                self.count + places,
                self._scope,
            )
        if own + places > free:
            raise self._too_many(
                f"{own} {self._scope} are there already of one caller ({name}), which may have as many as it leaves "
                f"to others: {free} are free",
                free,
                own + places,
                f"{self._scope} of one caller",
            )
        self.count += places
        self._of_callers[name] += places
        return name

    def give_back(self, name: str, places: int = 1) -> None:
        self.count -= places
        self._of_callers[name] -= places
        if not self._of_callers[name]:
            del self._of_callers[name]

    def _too_many(self, text: str, limit: int, value: int, scope: str) -> TooManyRequests:
        metadata = {"limit": limit, "value": value, "scope": scope}
        return TooManyRequests(text + self._setting, metadata=metadata, retry_after=RETRY_SECONDS)
