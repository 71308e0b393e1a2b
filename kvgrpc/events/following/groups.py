"""The needs of a model's cache groups, so that a prefix counts: windows, states, other full attention. Pure.

A prefix is of use to an engine where every group of its cache has what it needs of it: full attention all blocks, a
sliding window the blocks that the next token still sees, a state (mamba) the block in which the prefix ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

# Whether a group, by its number, holds a block.
Holds = Callable[[int, int], bool]

_WINDOWS = frozenset({"sliding_window", "sliding_window_mla", "chunked_local_attention"})
_STATES = frozenset({"mamba"})
# What belongs to another sequence than the prompt's.
_NEEDLESS = frozenset({"encoder_only_attention", "cross_attention"})


class CacheGroup(NamedTuple):
    """One group of a cache, as its events last told: ``window`` and ``page_tokens`` in tokens, 0: not told."""

    kind: str
    window: int
    page_tokens: int


def usable(
    prefix: int, page_tokens: int, hashes: Sequence[int], step: int, groups: dict[int, CacheGroup], holds: Holds
) -> int:
    """Returns how many of the first ``prefix`` blocks (of ``page_tokens``) are of use where these groups hold blocks.

    ``hashes`` are those of the prompt in steps of ``step`` tokens (0: of a block); ``holds`` says whether a group holds
    a block. The longest prefix that all of them can use.
    """
    step = step or page_tokens or 1
    unit = max(1, (page_tokens or step) // step)
    position = prefix * unit
    needs: list[tuple[int, CacheGroup, int]] = []
    sizes = [unit]
    for number, group in groups.items():
        size = max(1, (group.page_tokens or page_tokens) // step)
        if group.kind in _STATES or (group.kind in _WINDOWS and group.window):
            needs.append((number, group, size))
        elif group.kind not in _NEEDLESS:
            # All of what is held here is held of any shorter prefix: it is looked at once.
            position = _all_of(position, number, size, hashes, holds)
            sizes.append(size)
    while position > 0:
        least = min(position - position % size for size in sizes)
        for number, group, size in needs:
            least = min(least, _usable(position, number, group, size, step, hashes, holds))
        least -= least % unit
        if least == position:
            return position // unit
        position = least
    return 0


def _usable(
    position: int, number: int, group: CacheGroup, size: int, step: int, hashes: Sequence[int], holds: Holds
) -> int:
    """The longest prefix up to ``position`` (in steps) that may be of use to one group, of blocks of ``size`` steps."""
    position -= position % size
    if group.kind in _STATES:
        return position if not position or holds(number, hashes[position - 1]) else position - size
    needed = -(-(group.window - 1) // (size * step))
    for end in range(position, max(0, position - needed * size), -size):
        if not holds(number, hashes[end - 1]):
            return end - size
    return position


def _all_of(position: int, number: int, size: int, hashes: Sequence[int], holds: Holds) -> int:
    """The longest prefix up to ``position`` of which a group of full attention has all."""
    position -= position % size
    for end in range(size, position + 1, size):
        if not holds(number, hashes[end - 1]):
            return end - size
    return position
