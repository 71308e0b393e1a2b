"""The pages that a cache of kvgrpc's lends: those on its host, and which heads of the model they hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvgrpc.errors import InvalidRequest
from kvgrpc.prefetch.manager import PrefetchManager, keys_of
from kvgrpc.prefetch.pools.shape import HostLayout, PageShape
from kvgrpc.prefetch.storage.base import PageBuffers
from kvgrpc.prefetch.tree.keeper import ReadsBehind
from kvgrpc.pull.common import DTYPES, CommonPages, PageAxes
from kvgrpc.pull.heads import HeadRows, PageHeads, Share, divides, ranks_with
from kvgrpc.pull.lending.lender import LentPages


def lent_of(cache: PrefetchManager) -> LentPages:
    """The pages that a cache of kvgrpc's has on its host. Raises InvalidRequest for heads that no rank of its place
    has."""
    shape, namespace = cache.config.shape, cache.namespace
    own = _heads_of(shape)
    found = LentPages(_HostCache(cache), cache.keys, shape.page_bytes, shape.page_tokens, shape.dtype)
    if (namespace.pp_size, namespace.cp_size) == (1, 1) and (own is not None or namespace.tp_size == 1):
        found = replace(found, common=_common_of(shape, cache.host.layout))
    if own is None or namespace.replicated:
        return found
    own = own.of_rank(namespace.tp_size, namespace.tp_rank)
    if not divides(own.total, namespace.tp_size) or own.count != shape.heads:
        rule = f"{own.count}, the share of tp{namespace.tp_rank} of {namespace.tp_size} of {own.total} heads"
        raise InvalidRequest.of("prefetch.shape.heads", shape.heads, rule)

    def share(tp_size: int, tp: int) -> Share:
        theirs = own.of_rank(tp_size, tp)
        config = replace(cache.config, shape=shape.with_heads(theirs.count))
        identity = keys_of(config, replace(namespace, tp_rank=tp, tp_size=tp_size)).identity
        return Share(tp, identity, (theirs,))

    def shares(tp_size: int) -> list[Share]:
        return [share(tp_size, tp) for tp in ranks_with(own, tp_size)]

    return replace(found, heads=(own,), shares=shares)


def _heads_of(shape: PageShape) -> PageHeads | None:
    """The heads of a page of the host pool: in all of its layouts a row is a token of a layer. None: unknown."""
    if not shape.heads_total or any(each.name not in ("k", "v") for each in shape.components):
        return None
    rows = shape.layers * shape.page_tokens
    sizes = [each.layer_bytes // (shape.page_tokens * shape.heads) for each in shape.components]
    return PageHeads(shape.heads_total, 0, shape.heads, tuple(HeadRows(rows, size) for size in sizes))


def _common_of(shape: PageShape, layout: HostLayout) -> CommonPages | None:
    """Of a cache with all layers of the model, whose hashes are the common ones."""
    sizes = [each.layer_bytes for each in shape.components]
    if [each.name for each in shape.components] != ["k", "v"] or sizes[0] != sizes[1] or shape.dtype not in DTYPES:
        return None
    row = shape.page_tokens * shape.heads
    if not row or sizes[0] % row:
        return None
    token_first = layout is HostLayout.PAGE_FIRST
    order = ("kv", "token", "layer", "head") if token_first else ("kv", "layer", "token", "head")
    axes = PageAxes(order, shape.layers, shape.page_tokens, shape.heads, sizes[0] // row)
    return CommonPages(axes, heads_total=shape.heads_total)


class _HostCache:
    """The pages that a rank's cache has on its host, as a lender reads them."""

    def __init__(self, cache: PrefetchManager) -> None:
        self._keeper = cache.controller.keeper
        self._host = cache.host

    def count(self, hashes: Sequence[str]) -> int:
        with self.reading(hashes) as pages:
            return len(pages)

    @contextlib.contextmanager
    def reading(self, hashes: Sequence[str], first: int = 0) -> Iterator[Sequence[int]]:
        keeper = self._keeper
        behind = isinstance(keeper, ReadsBehind)
        pages = keeper.pages_behind(hashes, first) if isinstance(keeper, ReadsBehind) else keeper.pages_of(hashes)
        try:
            yield (pages if behind else pages[first:]).tolist()
        finally:
            self._host.table.end_read(pages)

    def buffers(self, page: int) -> PageBuffers:
        return self._host.page_buffers(page)
