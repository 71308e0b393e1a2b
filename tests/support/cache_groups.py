"""What a model's cache groups need of a prefix, length by length: the rule that an index looks up in fewer steps."""

from __future__ import annotations

from collections.abc import Container, Sequence

from kvgrpc.events.following.groups import CacheGroup


def serves(length: int, group: CacheGroup, hashes: Sequence[int], held: Container[int], page: int) -> bool:
    """True if this group, which holds these blocks, has what a prefix of so many blocks of ``page`` tokens needs."""
    size = (group.page_tokens or page) // page
    ends = list(range(size, length + 1, size))
    if group.kind == "cross_attention" or not length:
        return True
    if length % size:
        return False
    if group.kind == "mamba":
        ends = ends[-1:]
    elif group.kind == "sliding_window":
        # The next token sees itself and window - 1 tokens before it.
        ends = [end for end in ends if end * page > length * page - (group.window - 1)]
    return all(hashes[end - 1] in held for end in ends)
