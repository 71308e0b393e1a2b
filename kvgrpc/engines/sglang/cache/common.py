"""SGLang's host pages as other engines have them: of another kind, whose common names are SGLang's storage hashes, or
with their heads divided among more or fewer ranks."""

from __future__ import annotations

from typing import Any

from kvgrpc.prefetch.storage.keys import KeyMode
from kvgrpc.pull.common import DTYPES, CommonPages, PageAxes
from kvgrpc.pull.heads import HeadRows, PageHeads, divides

_POOL = "MHATokenToKVPoolHost"
# Of a page as its buffers lie one behind the other, by the pool's layout: MHATokenToKVPoolHost.init_kv_buffer.
_ORDERS = {
    "layer_first": ("layer", "kv", "token", "head"),
    "page_first": ("kv", "token", "layer", "head"),
    "page_first_direct": ("kv", "layer", "token", "head"),
    "page_head": ("kv", "head", "token", "layer"),
}


def order_of(pool: Any, mode: KeyMode) -> tuple[str, ...] | None:
    """The axes of a page, outermost first; None for pages that are not keys and values of all layers alone, all of one
    size. ``pool``: SGLang's host pool; ``mode``: in which the buffers of a page are put in order."""
    order = _ORDERS.get(str(getattr(pool, "layout", "")))
    if type(pool).__name__ != _POOL or order is None:
        return None
    # A draft's layers, another width of values, a format of its own: other engines have none of them.
    # SGLang 0.5.21 has a class of its own for values of another width, and pools of this one do not name theirs.
    if pool.layer_num != pool.target_layer_num or pool.head_dim != getattr(pool, "v_head_dim", pool.head_dim):
        return None
    if getattr(pool, "storage_format_tag", None) is not None:
        return None
    if _keys_first(pool, mode):
        order = ("kv", "layer", "token", "head")
    row = pool.head_num * _head_bytes(pool)
    return order if 2 * pool.layer_num * pool.page_size * row == pool.size_per_token * pool.page_size else None


def common_of(pool: Any, mode: KeyMode, model: str = "", heads: PageHeads | None = None) -> CommonPages | None:
    """None for pages of which other engines know nothing. ``model``: path or name of the model, where it is served
    under another one; ``heads``: those of the pool's pages, where its rank has some of them; None: it has them all."""
    order = order_of(pool, mode)
    if order is None or str(pool.dtype).removeprefix("torch.") not in DTYPES:
        return None
    axes = PageAxes(order, pool.layer_num, pool.page_size, pool.head_num, _head_bytes(pool))
    return CommonPages(axes, model=model, heads_total=0 if heads is None else heads.total)


def heads_of_pool(pool: Any, mode: KeyMode, heads_total: int, tp_size: int, tp_rank: int) -> PageHeads | None:
    """The heads of a page of one rank; None where nobody can tell. ``heads_total``: of the model, 0: unknown."""
    order = order_of(pool, mode)
    if order is None or not heads_total or not divides(heads_total, tp_size):
        return None
    rows, each = pool.layer_num * pool.page_size, _head_bytes(pool)
    # Keys and values lie alike; where a head's tokens and layers lie together, they are one row.
    section = HeadRows(2, rows * each) if order[1] == "head" else HeadRows(2 * rows, each)
    found = PageHeads(heads_total, 0, heads_total, (section,)).of_rank(tp_size, tp_rank)
    return found if found.count == pool.head_num else None


def words_of(pool: Any, mode: KeyMode, heads: int | None = None) -> str:
    """The order of bytes of a page, in fixed words: a part of the identity of pages. ``heads``: of a rank of another
    tensor-parallel size; None: those of the pool."""
    shape = {name: getattr(pool, name) for name in ("layer_num", "head_num", "head_dim") if hasattr(pool, name)}
    if heads is not None:
        shape["head_num"] = heads
    words = [type(pool).__name__, str(getattr(pool, "layout", "")), *(f"{name}={shape[name]}" for name in shape)]
    return " ".join([*words, "keys first"] if _keys_first(pool, mode) else words)


def _keys_first(pool: Any, mode: KeyMode) -> bool:
    """True if a page's buffers are put in the order of SGLang's own objects, which is another one than the pool's."""
    return mode is not KeyMode.KVGRPC and getattr(pool, "layout", "") == "layer_first"


def _head_bytes(pool: Any) -> int:
    return int(pool.head_dim * pool.dtype.itemsize)
