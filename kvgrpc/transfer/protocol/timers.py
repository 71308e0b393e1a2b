"""Deadlines in ticks: setting, moving and clearing one takes the same time however many there are. Pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """At most one tick for each key. The owner asks once a tick what is due, and skips no tick."""

    __slots__ = ("_keys", "_ticks")

    def __init__(self) -> None:
        self._ticks: dict[Key, int] = {}
        self._keys: dict[int, dict[Key, None]] = {}

    def __len__(self) -> int:
        return len(self._ticks)

    def set(self, key: Key, tick: int) -> None:
        """Makes the key due at ``tick``, which must not have passed; an earlier setting of it is forgotten."""
        before = self._ticks.get(key)
        if before is not None:
            self._keys[before].pop(key, None)
        self._ticks[key] = tick
        keys = self._keys.get(tick)
        if keys is None:
            keys = self._keys[tick] = {}
        keys[key] = None

    def clear(self, key: Key) -> None:
        tick = self._ticks.pop(key, None)
        if tick is not None:
            del self._keys[tick][key]

    def due(self, tick: int) -> Collection[Key]:
        """Removes and returns the keys that are due in this tick, each once, in the order in which they were set."""
        keys = self._keys.pop(tick, None)
        if keys is None:
            return ()
        for key in keys:
            del self._ticks[key]
        return keys
