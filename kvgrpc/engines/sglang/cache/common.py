"""SGLang's host pages as engines of another kind have them. SGLang's storage hashes are the common names."""

from __future__ import annotations

from typing import Any

from kvgrpc.prefetch.storage.keys import KeyMode
from kvgrpc.pull.common import DTYPES, CommonPages, PageAxes

_POOL = "MHATokenToKVPoolHost"
# Of a page as its buffers lie one behind the other, by the pool's layout: MHATokenToKVPoolHost.init_kv_buffer.
_ORDERS = {
    "layer_first": ("layer", "kv", "token", "head"),
    "page_first": ("kv", "token", "layer", "head"),
    "page_first_direct": ("kv", "layer", "token", "head"),
    "page_head": ("kv", "head", "token", "layer"),
}


def common_of(pool: Any, mode: KeyMode, model: str = "") -> CommonPages | None:
    """None for pages that are not keys and values of all layers and heads alone, all of one size. ``pool``: SGLang's
    host pool of a rank that is the only one; ``mode``: in which the buffers of a page are put in order; ``model``: path
    or name of the model, where it is served under another one."""
    order = _ORDERS.get(str(getattr(pool, "layout", "")))
    dtype = str(getattr(pool, "dtype", "")).removeprefix("torch.")
    if type(pool).__name__ != _POOL or order is None or dtype not in DTYPES:
        return None
    # A draft's layers, another width of values, a format of its own: other engines have none of them.
    if pool.layer_num != pool.target_layer_num or pool.head_dim != pool.v_head_dim:
        return None
    if getattr(pool, "storage_format_tag", None) is not None:
        return None
    if mode is not KeyMode.KVGRPC and pool.layout == "layer_first":
        order = ("kv", "layer", "token", "head")  # as SGLang's own objects
    axes = PageAxes(order, pool.layer_num, pool.page_size, pool.head_num, pool.head_dim * pool.dtype.itemsize)
    return CommonPages(axes, model=model) if axes.nbytes == pool.size_per_token * pool.page_size else None
