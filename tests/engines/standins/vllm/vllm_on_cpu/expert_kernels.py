"""In torch, what models with experts ask of vLLM's CPU worker: kernels that only a CPU build of vLLM has; and what no
build has: collectives of rows, of which each rank may have another number, and some of the experts at each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from vllm_on_cpu.kernels import kernel


@kernel("(Tensor weight, Tensor(a!) packed, str isa) -> ()")
def prepack_moe_weight(weight: Tensor, packed: Tensor, isa: str) -> None:
    """The order that a kernel likes; ours takes them as they are."""
    packed.copy_(weight)


@kernel(
    "(Tensor(a!) out, Tensor given, Tensor w13, Tensor w2, Tensor? w13_bias, Tensor? w2_bias, Tensor weights,"
    " Tensor experts, bool skip_weighted, str act, str isa) -> ()"
)
def cpu_fused_moe(
    out: Tensor,
    given: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    weights: Tensor,
    experts: Tensor,
    skip_weighted: bool,
    act: str,
    isa: str,
) -> None:
    """Each token (row) by the experts that ``experts`` names for it; w13 has the gate, then what it lets through."""
    assert (act, w13_bias, w2_bias) == ("silu", None, None)
    out.zero_()
    for expert in experts.unique().tolist():
        rows, places = (experts == expert).nonzero(as_tuple=True)
        gate, up = (given[rows] @ w13[expert].T).chunk(2, -1)
        computed = (silu(gate) * up) @ w2[expert].T
        out.index_add_(0, rows, computed if skip_weighted else computed * weights[rows, places, None].to(out.dtype))


def all_gatherv(
    communicator: Any, given: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
) -> Tensor | list[Tensor]:
    """The rows of all ranks, one after the other."""
    if isinstance(given, list):
        return [_rows_of_all(communicator, each, sizes) for each in given]
    return _rows_of_all(communicator, given, sizes)


def reduce_scatterv(communicator: Any, given: Tensor, dim: int = 0, sizes: list[int] | None = None) -> Tensor:
    """The rank's own rows of the sum."""
    total, own = given.contiguous().clone(), communicator.rank_in_group
    torch.distributed.all_reduce(total, group=communicator.device_group)
    count = total.shape[0] // communicator.world_size
    counts = sizes or [count] * communicator.world_size
    first = sum(counts[:own])
    return total[first : first + counts[own]].contiguous()


def by_own_experts(apply: Callable[..., None]) -> Callable[..., None]:
    """vLLM's for CPUs takes ``experts`` for places in the weights, whatever its map says."""

    def apply_own(self: Any, *, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None, **more: Any) -> None:
        if expert_map is not None:
            places = expert_map[topk_ids.long()]
            topk_weights = topk_weights.where(places >= 0, 0)  # another rank computes it
            topk_ids = places.clamp(min=0).to(topk_ids.dtype)
        apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **more)

    return apply_own


def register() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CPUUnquantizedExperts.apply = by_own_experts(CPUUnquantizedExperts.apply)

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def _rows_of_all(communicator: Any, given: Tensor, sizes: list[int] | None) -> Tensor:
    parts = []
    for rank, source in enumerate(communicator.ranks):
        count = given.shape[0] if sizes is None else sizes[rank]
        own = rank == communicator.rank_in_group
        part = given.contiguous() if own else given.new_empty((count, *given.shape[1:]))
        torch.distributed.broadcast(part, src=source, group=communicator.device_group)
        parts.append(part)
    return torch.cat(parts)
