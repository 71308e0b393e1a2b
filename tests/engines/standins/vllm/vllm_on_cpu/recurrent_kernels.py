"""In torch, the kernels of layers that keep a state for each request: convolution, gated delta rule, Mamba 2.

A slot is the number of a request's state; the states of all requests lie in one tensor, (slots, ...).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from vllm_on_cpu.kernels import kernel


@kernel(
    "(Tensor x, Tensor(a!) states, Tensor weight, Tensor? bias, str? activation, Tensor? slots, Tensor? starts,"
    " int nobody) -> Tensor"
)
def causal_conv1d_update_cpu_vec(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    slots: Tensor | None,
    starts: Tensor | None,
    nobody: int,
) -> Tensor:
    """One new token a request (requests, channels), behind the last ones that its state has (channels, tokens)."""
    out, before = torch.zeros_like(x), weight.shape[1] - 1
    for number in range(len(x)):
        slot = number if slots is None else int(slots[number])
        if slot == nobody:
            continue
        seen = torch.cat([states[slot, :, :before], x[number, :, None].to(states.dtype)], dim=1)
        summed = (seen.float() * weight.float()).sum(1)
        summed = summed if bias is None else summed + bias.float()
        out[number] = (silu(summed) if activation in ("silu", "swish") else summed).to(x.dtype)
        states[slot, :, :before] = seen[:, 1:]
    return out


@kernel("(Tensor decay_log, Tensor a, Tensor b, Tensor bias) -> (Tensor, Tensor)")
def fused_gdn_gating_cpu(decay_log: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of each token's decay, and its beta: (1, tokens, heads)."""
    return _log_decay(decay_log, a, bias).unsqueeze(0), b.float().sigmoid().unsqueeze(0)


@kernel(
    "(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, Tensor(a!) states, bool final, Tensor starts,"
    " bool head_first, bool normed, Tensor slots, float epsilon) -> (Tensor, Tensor)"
)
def chunk_gated_delta_rule_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    final: bool,
    starts: Tensor,
    head_first: bool,
    normed: bool,
    slots: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Requests of many tokens, (1, tokens, heads, size): request i has tokens starts[i] to starts[i + 1]."""
    out = torch.empty_like(value)
    _each(out[0], query[0], key[0], value[0], decay[0], beta[0], states, starts, slots)
    return out, torch.empty(0)


@kernel(
    "(Tensor decay_log, Tensor bias, Tensor query, Tensor key, Tensor value, Tensor a, Tensor b, Tensor(a!) states,"
    " Tensor slots, Tensor starts, bool normed, float softplus_beta, float softplus_threshold) -> Tensor"
)
def fused_sigmoid_gating_delta_rule_update_cpu(
    decay_log: Tensor,
    bias: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    normed: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """Requests of one new token each; the same, with its gates."""
    out = torch.empty_like(value)
    decay, beta = _log_decay(decay_log, a, bias), b.float().sigmoid()
    _each(out[0], query[0], key[0], value[0], decay, beta, states, starts, slots)
    return out.transpose(0, 1)


def _log_decay(decay_log: Tensor, a: Tensor, bias: Tensor) -> Tensor:
    return -decay_log.float().exp() * softplus(a.float() + bias.float())


def _each(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    starts: Tensor,
    slots: Tensor,
) -> None:
    """The gated delta rule, token by token: a state forgets, then learns what it did not know of the token's value."""
    heads = value.shape[1]
    query, key = (_unit(each).repeat_interleave(heads // each.shape[1], 1) for each in (query, key))
    for (begin, end), slot in zip(itertools.pairwise(starts.tolist()), slots.tolist(), strict=False):
        state = states[slot].float()
        for token in range(begin, end):
            state = state * decay[token].exp()[:, None, None]
            known = torch.einsum("hkv,hk->hv", state, key[token])
            learnt = (value[token].float() - known) * beta[token].float()[:, None]
            state = state + key[token][:, :, None] * learnt[:, None, :]
            asked = query[token] / key.shape[2] ** 0.5
            out[token] = torch.einsum("hkv,hk->hv", state, asked).to(out.dtype)
        states[slot] = state.to(states.dtype)


def _unit(vectors: Tensor) -> Tensor:
    """Each of length 1."""
    wide = vectors.float()
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)


@kernel(
    "(Tensor(a!) out, Tensor(b!) states, Tensor x, Tensor step, Tensor rate, Tensor written, Tensor read, Tensor? skip,"
    " Tensor? gate, Tensor starts) -> ()"
)
def mamba_chunk_scan_fwd_cpu(
    out: Tensor,
    states: Tensor,
    x: Tensor,
    step: Tensor,
    rate: Tensor,
    written: Tensor,
    read: Tensor,
    skip: Tensor | None,
    gate: Tensor | None,
    starts: Tensor,
) -> None:
    """Requests of many tokens, (tokens, heads, size); states[i] is that of request i, before and then behind them."""
    for number, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        state = states[number].float()
        for token in range(begin, end):
            gated = None if gate is None else gate[token]
            about = (x[token], step[token, :, None], rate[:, None, None], written[token], read[token], skip, gated)
            state, result = _scan(state, *about)
            out[token] = result.to(out.dtype)
        states[number] = state.to(states.dtype)


@kernel(
    "(Tensor(a!) states, Tensor x, Tensor step, Tensor rate, Tensor written, Tensor read, Tensor? skip, Tensor? gate,"
    " Tensor? bias, bool soft, Tensor? slots, Tensor? slots_after, int nobody, Tensor(b!) out, Tensor? accepted,"
    " Tensor? starts) -> ()"
)
def selective_state_update_cpu(
    states: Tensor,
    x: Tensor,
    step: Tensor,
    rate: Tensor,
    written: Tensor,
    read: Tensor,
    skip: Tensor | None,
    gate: Tensor | None,
    bias: Tensor | None,
    soft: bool,
    slots: Tensor | None,
    slots_after: Tensor | None,
    nobody: int,
    out: Tensor,
    accepted: Tensor | None,
    starts: Tensor | None,
) -> None:
    """Requests of one new token each, (requests, heads, size)."""
    for number in range(len(x)):
        slot = number if slots is None else int(slots.flatten()[number])
        if slot == nobody:
            continue
        size = step[number].float() if bias is None else step[number].float() + bias.float()
        gated = None if gate is None else gate[number]
        about = (x[number], softplus(size) if soft else size, rate, written[number], read[number], skip, gated)
        state, result = _scan(states[slot].float(), *about)
        states[slot], out[number] = state.to(states.dtype), result.to(out.dtype)


def _scan(
    state: Tensor,
    x: Tensor,
    step: Tensor,
    rate: Tensor,
    written: Tensor,
    read: Tensor,
    skip: Tensor | None,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Mamba 2 at one token: the state (heads, size, state size) behind it, and what it makes of the token."""
    heads = len(x)
    written, read = (each.float().repeat_interleave(heads // len(each), 0)[:, None] for each in (written, read))
    state = state * (step.float()[..., None] * rate.float()).exp() + (step.float() * x.float())[..., None] * written
    result = (state * read).sum(-1)
    if skip is not None:
        result = result + skip.float().reshape(heads, -1) * x.float()
    return state, result if gate is None else result * silu(gate.float())
