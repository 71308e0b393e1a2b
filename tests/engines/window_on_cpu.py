"""Lets SGLang's attention for CPUs read a pool of sliding windows, in which it only writes to the right place.

SGLang's backends for GPUs look up where a token lies in that pool; torch_native takes the numbers of the other pool.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(Backend, name, _translating(getattr(Backend, name)))


def _translating(attend: Any) -> Any:
    def attend_there(
        self: Any, query: Any, output: Any, keys: Any, values: Any, tokens: Any, *rest: Any, **more: Any
    ) -> Any:
        if more.get("sliding_window_size") is not None and self.use_sliding_window_kv_pool:
            tokens = self.token_to_kv_pool.translate_loc_from_full_to_swa(tokens)
        return attend(self, query, output, keys, values, tokens, *rest, **more)

    return attend_there
