"""In torch, the kernels of speculative decoding with greedy sampling that only a CPU build of vLLM has.

Of request i there are drafts ends[i - 1] to ends[i] in a row of all requests' drafts.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from vllm_on_cpu.kernels import kernel

_REJECTED = -1


@kernel(
    "(Tensor(a!) out, Tensor ends, Tensor drafts, Tensor right, Tensor next, Tensor? greedy, int most) -> ()",
)
def rejection_greedy_sample_kernel_impl(
    out: Tensor, ends: Tensor, drafts: Tensor, right: Tensor, next: Tensor, greedy: Tensor | None, most: int
) -> None:
    """Drafts up to the first one that is not the model's own token, and that one; behind all of them the next one."""
    for number, (begin, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        assert greedy is None or greedy[number], "other sampling is not for these tests"
        good = int((drafts[begin:end] == right[begin:end]).long().cumprod(0).sum())
        found = torch.cat([right[begin:end], next[number].flatten()])[: good + 1]
        out[number, : len(found)] = found


@kernel(
    "(Tensor ends, Tensor valid, Tensor starts, Tensor(a!) sampled, Tensor(b!) rejected, int requests) -> ()",
)
def eagle_prepare_inputs_padded_kernel_impl(
    ends: Tensor, valid: Tensor, starts: Tensor, sampled: Tensor, rejected: Tensor, requests: int
) -> None:
    """How many drafts were rejected, and which token of the batch is the last good one."""
    drafts = torch.diff(ends[:requests], prepend=torch.zeros(1, dtype=ends.dtype))
    bad = torch.where(drafts > 0, drafts + 1 - valid[:requests], torch.zeros_like(drafts))
    rejected[:requests] = bad
    sampled[:requests] = (starts[1 : requests + 1] - 1 - bad).to(sampled.dtype)


@kernel(
    "(Tensor sampled, Tensor discarded, Tensor otherwise, Tensor(a!) next, Tensor(b!) valid, int vocabulary,"
    " int width, int requests) -> ()",
)
def eagle_prepare_next_token_padded_kernel_impl(
    sampled: Tensor,
    discarded: Tensor,
    otherwise: Tensor,
    next: Tensor,
    valid: Tensor,
    vocabulary: int,
    width: int,
    requests: int,
) -> None:
    """The last good token of each request, and how many there are."""
    for number in range(requests):
        row = sampled[number, :width]
        good = row[(row != _REJECTED) & (row < vocabulary)]
        count = 0 if discarded[number] else len(good)
        next[number] = good[-1] if count else otherwise[number]
        valid[number] = count


@kernel(
    "(Tensor positions, Tensor blocks, Tensor(a!) lengths, Tensor(b!) clamped, Tensor(c!) slots, int size, int longest,"
    " int nowhere) -> ()",
)
def eagle_step_slot_mapping_metadata_kernel_impl(
    positions: Tensor,
    blocks: Tensor,
    lengths: Tensor,
    clamped: Tensor,
    slots: Tensor,
    size: int,
    longest: int,
    nowhere: int,
) -> None:
    """Each request goes on by one token."""
    count = len(positions)
    over = positions + 1 >= longest
    where = torch.where(over, torch.zeros_like(positions), positions + 1)
    block = (where // size).clamp(max=blocks.shape[1] - 1)
    slot = blocks[torch.arange(count), block.long()].long() * size + where % size
    grown = torch.where(over, torch.ones_like(lengths[:count]), lengths[:count] + 1)
    clamped[:count] = where
    slots[:count] = torch.where(over, torch.full_like(slot, nowhere), slot)
    slots[count:] = nowhere
    lengths[:count] = grown.clamp(max=longest)


@kernel(
    "(Tensor tokens, Tensor positions, Tensor next, Tensor(a!) ids, Tensor(b!) places, Tensor(c!) rejected,"
    " Tensor(d!) masked, Tensor(e!) new, Tensor(f!) hidden, Tensor starts, Tensor ends, int padding, int parallel,"
    " int total, int slots, bool shifted) -> ()",
)
def copy_and_expand_eagle_inputs_kernel_impl(
    tokens: Tensor,
    positions: Tensor,
    next: Tensor,
    ids: Tensor,
    places: Tensor,
    rejected: Tensor,
    masked: Tensor,
    new: Tensor,
    hidden: Tensor,
    starts: Tensor,
    ends: Tensor,
    padding: int,
    parallel: int,
    total: int,
    slots: int,
    shifted: bool,
) -> None:
    """What a draft model computes: the good tokens of a request, the next one behind them, then what was rejected."""
    assert not shifted and slots == 1, "these are for draft models of their own, one token after the other"
    for number, (begin, stop) in enumerate(itertools.pairwise(starts.tolist())):
        good = tokens[begin : int(ends[number]) + 1]
        bad = stop - int(ends[number]) - 1
        first = begin + number
        last = first + len(good)
        ids[first:last], ids[last], ids[last + 1 : last + 1 + bad] = good, next[number], padding
        places[first : last + 1] = positions[begin] + torch.arange(len(good) + 1)
        places[last + 1 : last + 1 + bad] = 0
        rejected[first : last + 1 + bad] = torch.arange(len(good) + 1 + bad) > len(good)
        masked[first : last + 1 + bad] = False
        new[number] = last
