"""Prompts that a holder was asked to count: who takes one in many rooms names it once, and not with each room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

# Hashes in all prompts together, about 120 bytes each; two of the longest prompts.
MAX_HASHES = 131_072


class CountedPrompts:
    """Those counted last, by the name that the asker gave. Thread-safe. One that is forgotten is named once more.

    A name is random and a secret between asker and holder. Hashes are none: two askers may want pages of one prompt
    from different pages on, and whoever has heard of a hash could put another prompt's pages under it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: OrderedDict[bytes, Sequence[str]] = OrderedDict()
        self._hashes = 0

    def get(self, name: bytes) -> Sequence[str] | None:
        """The page hashes of a prompt, as far as they were there when it was counted."""
        with self._lock:
            return self._by_name.get(name)

    def note(self, name: bytes, leading: Sequence[str]) -> None:
        """These leading pages of a prompt were counted."""
        with self._lock:
            self._hashes += len(leading) - len(self._by_name.pop(name, ()))
            self._by_name[name] = leading
            while self._hashes > MAX_HASHES:
                _, oldest = self._by_name.popitem(last=False)
                self._hashes -= len(oldest)
