"""Lets SGLang speculate on a CPU, with chains of drafts and greedy sampling. In torch: what its wheel has for GPUs
alone, or in sgl_kernel's build for CPUs. And torch_native attention for drafts and for their verification.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor


def register() -> None:
    from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
    from sglang.srt.mem_cache import allocation
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    spec_tree.sgl_build_tree_kernel_efficient_cpu = _chain
    spec_tree.sgl_verify_tree_greedy_cpu = _verify
    eagle.fill_bonus_tokens_cpu = _last_tokens
    cache_locs.assign_draft_cache_locs_contiguous_cpu = _slots_of_drafts
    cache_locs.assign_extend_cache_locs_cpu = _slots
    allocation.assign_req_to_token_pool_cpu = _give_slots

    extend = Backend.forward_extend

    def forward_extend(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        if batch.forward_mode.is_target_verify():
            batch = copy.copy(batch)
            batch.extend_prefix_lens = batch.seq_lens
            batch.extend_seq_lens = torch.full_like(batch.seq_lens, batch.spec_info.draft_token_num)
            batch.seq_lens = batch.extend_prefix_lens + batch.extend_seq_lens
        return extend(self, q, k, v, layer, batch, *rest, **more)

    class Step(Backend):
        """Of a chain: its token sees ``ahead`` drafts, itself among them, behind what is decided."""

        def __init__(self, runner: Any, ahead: int) -> None:
            super().__init__(runner)
            self._ahead = ahead

        def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any, **more: Any) -> Any:
            batch = copy.copy(batch)
            batch.seq_lens = batch.seq_lens + self._ahead
            return super().forward_decode(q, k, v, layer, batch, *rest, **more)

    class Steps:
        def __init__(self, runner: Any, count: int) -> None:
            self.attn_backends = [Step(runner, ahead) for ahead in range(1, count)]

        def init_forward_metadata(self, batch: Any) -> None:
            for backend in self.attn_backends:
                backend.init_forward_metadata(batch)

    Backend.forward_extend = forward_extend
    DraftBackendFactory.create_draft_extend_backend = lambda self: _named(Backend(self.draft_model_runner))
    DraftBackendFactory.create_decode_backend = lambda self: Steps(self.draft_model_runner, self.speculative_num_steps)


def _named(backend: Any) -> Any:
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "torch_native"
    return backend


def _chain(
    parents: Tensor,
    selected: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    following: Tensor,
    sibling: Tensor,
    topk: int,
    *sizes: Any,
) -> None:
    """Each draft follows the one before it."""
    assert topk == 1, "trees are not for these tests"
    count = index.shape[1]
    place = torch.arange(count)
    positions.copy_((lengths[:, None] + place).flatten())
    index.copy_(torch.arange(index.numel()).view_as(index))
    following.copy_(torch.where(place + 1 < count, place + 1, -1).expand_as(following))
    sibling.fill_(-1)


def _verify(
    *, predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, target_predict: Tensor,
    **tree: Tensor,
) -> None:  # fmt: skip
    """Drafts up to the first one that is not the model's own token; what it says behind them is the next."""
    width = candidates.shape[1]
    for number, right in enumerate(candidates[:, 1:] == target_predict[:, :-1]):
        good = int(right.long().cumprod(0).sum())
        first = number * width
        predicts[first : first + good + 1] = target_predict[number, : good + 1]
        accept_index[number, : good + 1] = first + torch.arange(good + 1)
        accept_token_num[number] = good


def _last_tokens(accepted: Tensor, counts: Tensor, last: Tensor, width: int) -> None:
    last.copy_(accepted.flatten()[torch.arange(len(counts)) * width + counts - 1])


def _slots(requests: Tensor, slots: Tensor, begins: Tensor, ends: Tensor, found: Tensor, *sizes: int) -> None:
    rows = zip(requests.tolist(), begins.tolist(), ends.tolist(), strict=True)
    found.copy_(torch.cat([slots[request, begin:end] for request, begin, end in rows]))


def _slots_of_drafts(
    requests: Tensor, slots: Tensor, lengths: Tensor, found: Tensor, width: int, topk: int, count: int
) -> None:
    _slots(requests, slots, lengths, lengths + topk * count, found)


def _give_slots(requests: Tensor, slots: Tensor, begins: Tensor, ends: Tensor, new: Tensor, *sizes: int) -> None:
    first = 0
    for request, begin, end in zip(requests.tolist(), begins.tolist(), ends.tolist(), strict=True):
        slots[request, begin:end] = new[first : first + end - begin]
        first += end - begin
