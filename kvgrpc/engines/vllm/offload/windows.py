"""The chunks of layers with sliding windows that an order brings behind those of the layers that see the whole prompt.

A request takes as many leading pages as have the last chunks of each window before their end. vLLM looks for them as
here: from the end back, and where one is missing with no more pages than are before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from kvgrpc.engines.vllm.offload.keys import ChunkNames


class WindowChunks:
    """Of one order. ``most``: chunks that it may bring; ``brought``: those that it brings, with their pages, as whoever
    looks has noted them."""

    def __init__(self, names: ChunkNames, hashes: Sequence[str]) -> None:
        self._names, self._hashes = names, hashes
        self.most = sum(min(window, len(hashes)) for _, window in names.windows)
        self.brought: dict[OffloadKey, int] = {}
        # Group and page of those that were found.
        self._there: set[tuple[int, int]] = set()
        self._asked_ahead: set[tuple[int, int]] = set()

    def step(self, pages: int, look: Callable[[OffloadKey, int], LookupResult], looks: int) -> tuple[int, bool]:
        """Returns how many of the leading ``pages`` may be used, as far as is known, and whether all that these need is
        there. ``look``: by key and page, ``looks`` times at most, for what was not found yet."""
        waits, late, left = False, False, self._needed(pages)
        while (each := next(left, None)) is not None:
            group, page = each
            if not looks:
                return pages, False
            looks -= 1
            result = look(self._names.key(self._hashes[page], group), page)
            if result is LookupResult.MISS:
                pages, waits, late, left = page, False, False, self._needed(page)
            elif result is LookupResult.HIT:
                self._there.add(each)
            else:
                waits, late = True, late or result is LookupResult.RETRY
        if late:
            self._ask_ahead(pages, look, looks)
        return pages, not waits

    def _ask_ahead(self, pages: int, look: Callable[[OffloadKey, int], LookupResult], looks: int) -> None:
        """A slow tier answers in a later step, at once what one step asks for. Of windows vLLM stores little but the
        end of each prompt, so that one answer after the other would be that there is none."""
        for group, window in self._names.windows:
            for page in range(pages - window - 1, -1, -1):
                if (group, page) in self._asked_ahead:
                    continue
                if not looks:
                    return
                looks -= 1
                self._asked_ahead.add((group, page))
                if look(self._names.key(self._hashes[page], group), page) is not LookupResult.RETRY:
                    break

    def came(self, pages: int) -> int:
        """Chunks that it brings for these leading pages."""
        return sum(page < pages for page in self.brought.values())

    def _needed(self, pages: int) -> Iterator[tuple[int, int]]:
        for group, window in self._names.windows:
            last = range(pages - 1, max(0, pages - window) - 1, -1)
            yield from ((group, page) for page in last if (group, page) not in self._there)
