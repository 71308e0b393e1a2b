"""Lets SGLang run models with states on a CPU: its wheel has their operators for GPUs alone, here they are in torch.

A state advances token by token, as the papers have it. SGLang's own code decides whose state that is, and where.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor

from tests.engines import latent_on_cpu

CHUNK = 64  # of the delta rules, on a GPU


def register() -> None:
    kernels = importlib.import_module("sgl_kernel.mamba")
    absent = {
        "fused_gdn_gating_cpu": gates,
        "fused_sigmoid_gating_delta_rule_update_cpu": decode_delta_rule,
        "fused_sigmoid_mul_cpu": lambda x, gate: x.mul_(gate.reshape(x.shape).sigmoid()),
        "fused_qk_gemma_rmsnorm_cpu": norm_queries_and_keys,
        "fused_qk_gemma_rmsnorm_with_gate_cpu": norm_queries_and_keys_beside_gate,
        "fused_qkvzba_split_reshape_cat_contiguous_cpu": split_projections,
    }
    for name, function in absent.items():  # looked up by name when SGLang's modules are imported
        setattr(torch.ops.sgl_kernel, name, function)
    for name, function in {
        "causal_conv1d_fn_cpu": convolve,
        "causal_conv1d_update_cpu": convolve_one,
        "chunk_gated_delta_rule_cpu": extend_delta_rule,
    }.items():
        setattr(kernels, name, function)

    from sglang.kernels.ops.mamba import causal_conv1d_triton

    causal_conv1d_triton.causal_conv1d_fn, causal_conv1d_triton.causal_conv1d_update = convolve, convolve_one

    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm
    from sglang.srt.layers.attention.linear.kernels import kda_triton
    from sglang.srt.layers.attention.mamba import mamba

    for suffix in ("", "_triton"):
        setattr(mamba, f"causal_conv1d_fn{suffix}", convolve)
        setattr(mamba, f"causal_conv1d_update{suffix}", convolve_one)
    mamba.mamba_chunk_scan_combined, mamba.selective_state_update = scan, scan_one
    kda_triton.chunk_kda = extend_kimi_delta_rule
    kda_triton.fused_sigmoid_gating_delta_rule_update = decode_kimi_delta_rule
    RMSNorm.forward = lambda self, x, z: gated_norm(x, self.weight, z, self.eps)
    FusedRMSNormGated.forward = lambda self, x, gate: _normed(x, self.weight, self.eps) * gate.sigmoid()
    latent_on_cpu.register()

    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.layers.attention import hybrid_linear_attn_backend

    mamba_hook.validate_mamba_extra_buffer = lambda *arguments, **more: None  # it takes a CPU for too little
    hybrid_linear_attn_backend.track_mamba_states_if_needed = keep_for_prefixes
    hybrid_linear_attn_backend.track_mamba_states_all_layers = keep_for_prefixes_in_all_layers
    torch.Tensor.pin_memory = lambda self: self


# States at ends of prefixes, which SGLang's prefix cache keeps when its pages are of several tokens.


def keep_for_prefixes(
    convolutions: Tensor, states: Tensor, slots: Tensor, wanted: Tensor, kept: Tensor, *unused: Any, **more: Any
) -> None:
    keep_for_prefixes_in_all_layers(convolutions[None], states[None], slots, wanted, kept)


def keep_for_prefixes_in_all_layers(
    convolutions: Tensor, states: Tensor, slots: Tensor, wanted: Tensor, kept: Tensor, *unused: Any, **more: Any
) -> None:
    source, target = slots[wanted].long(), kept[wanted].long()
    for pool in (convolutions, states):
        pool[:, target] = pool[:, source]


# Convolutions over the last tokens of a request. A state: its last inputs, [slots, channels, width - 1].


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    conv_states: Tensor,
    activation: str | None = "silu",
    **unused: Any,
) -> Tensor:
    """``x``: [channels, tokens of all requests]."""
    out = torch.empty_like(x)
    ends = query_start_loc.tolist()
    for request, slot in enumerate(cache_indices.tolist()):
        own = slice(ends[request], ends[request + 1])
        before = conv_states[slot] * bool(has_initial_state[request])
        seen = torch.cat((before, x[:, own]), -1)
        filtered = torch_functional.conv1d(seen[None], weight[:, None], bias, groups=len(weight))[0]
        out[:, own] = _activated(filtered, activation)
        conv_states[slot] = seen[:, seen.shape[1] - before.shape[1] :]
    return out


def convolve_one(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    **unused: Any,
) -> Tensor:
    """``x``: [requests, channels], one token each."""
    slots = conv_state_indices.long()
    seen = torch.cat((conv_state[slots], x[..., None]), -1)
    conv_state[slots] = seen[..., 1:]
    filtered = (seen * weight).sum(-1)
    return _activated(filtered if bias is None else filtered + bias, activation)


def _activated(x: Tensor, activation: str | None) -> Tensor:
    return torch_functional.silu(x) if activation else x


# The gated delta net (GDN), and KDA, of which each key has its own decay. A state: [slots, heads, values, keys].


def gates(decay: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return (-decay.exp() * torch_functional.softplus(a.float() + bias))[None], b.float().sigmoid()[None]


def extend_delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **unused: Any,
) -> tuple[Tensor, None, Tensor]:
    """And the states before each of a request's chunks. SGLang has cleared the slots of requests that begin."""
    queries, keys = (_unit(x[0]).repeat_interleave(v.shape[2] // x.shape[2], 1) for x in (q, k))
    out, between = torch.empty_like(v), []
    ends = cu_seqlens.tolist()
    for request, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].clone()
        for token in range(ends[request], ends[request + 1]):
            if (token - ends[request]) % CHUNK == 0:
                between.append(state)
            key = keys[token][:, None]
            state = state * g[0, token].exp().reshape(len(state), 1, -1)
            new = beta[0, token][:, None] * (v[0, token] - (state * key).sum(-1))
            state = state + new[..., None] * key
            out[0, token] = (state * queries[token][:, None]).sum(-1) * q.shape[-1] ** -0.5
        initial_state[slot] = state
    return out, None, torch.stack(between)[None]


def decode_delta_rule(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    **more: Any,
) -> Tensor:
    g, beta = gates(A_log, a, b, dt_bias)
    return extend_delta_rule(g=g, beta=beta, initial_state=initial_state_source, **more)[0]


def extend_kimi_delta_rule(*, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, **more: Any) -> Tensor:
    """``g`` and ``beta``: as the model gives them. Its other layers are latents."""
    heads = A_log.numel()
    steps = torch_functional.softplus(g.reshape(-1, heads, dt_bias.numel() // heads) + dt_bias.reshape(heads, -1))
    decay = -A_log.reshape(heads, 1).exp() * steps
    return extend_delta_rule(g=decay[None], beta=beta.reshape(1, -1, heads).sigmoid(), **more)[0]


def decode_kimi_delta_rule(*, a: Tensor, b: Tensor, initial_state_source: Tensor, **more: Any) -> Tensor:
    return extend_kimi_delta_rule(g=a, beta=b, initial_state=initial_state_source, **more)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


# What stands around it in a Qwen 3.5.


def gated_norm(x: Tensor, weight: Tensor, z: Tensor, epsilon: float) -> Tensor:
    return _normed(x, weight, epsilon) * torch_functional.silu(z)


def norm_queries_and_keys(
    q: Tensor, k: Tensor, weight: Tensor, key_weight: Tensor, epsilon: float, width: int
) -> tuple[Tensor, Tensor]:
    """The weights are what is added to 1."""
    return (
        _normed(q.reshape(-1, width), 1 + weight, epsilon),
        _normed(k.reshape(-1, width), 1 + key_weight, epsilon),
    )


def norm_queries_and_keys_beside_gate(
    q_gate: Tensor, k: Tensor, weight: Tensor, key_weight: Tensor, epsilon: float, width: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each head the query, and then its gate."""
    q, gate = q_gate.reshape(-1, heads, 2 * width).chunk(2, -1)
    return *norm_queries_and_keys(q, k, weight, key_weight, epsilon, width), gate.contiguous()


def split_projections(
    qkvz: Tensor, ba: Tensor, keys: int, values: int, key_width: int, value_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = values * value_width
    qkv, z = qkvz.split([2 * keys * key_width + wide, wide], -1)
    b, a = ba.split([values, values], -1)
    return qkv.contiguous(), z.reshape(-1, values, value_width), b.contiguous(), a.contiguous()


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


# Mamba 2. A state: [slots, heads, width of a head, width of the state].


def scan(
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    into: Tensor,
    out_of: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial_states: Tensor | None,
    out: Tensor,
    state_dtype: torch.dtype,
    **unused: Any,
) -> tuple[None, Tensor, None]:
    """Of each request the state behind its last token."""
    heads, ends = x.shape[2], cu_seqlens.tolist()
    states = x.new_zeros(len(ends) - 1, *x.shape[2:], into.shape[-1], dtype=state_dtype)
    if initial_states is not None:
        states.copy_(initial_states)
    steps = SimpleNamespace(
        dt=torch_functional.softplus(dt[0] + dt_bias),
        into=into[0].repeat_interleave(heads // into.shape[2], 1),
        out_of=out_of[0].repeat_interleave(heads // into.shape[2], 1),
    )
    for request, state in enumerate(states):
        for token in range(ends[request], ends[request + 1]):
            step = steps.dt[token][:, None]
            state.mul_((step * decay[:, None]).exp()[..., None])
            state.add_((step * x[0, token])[..., None] * steps.into[token][:, None])
            out[0, token] = (state * steps.out_of[token][:, None]).sum(-1) + D[:, None] * x[0, token]
    return None, states, None


def scan_one(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    into: Tensor,
    out_of: Tensor,
    D: Tensor,
    *,
    dt_bias: Tensor,
    state_batch_indices: Tensor,
    out: Tensor,
    **unused: Any,
) -> None:
    """One token of each request."""
    slots = state_batch_indices.long()
    _, states, _ = scan(
        x[None],
        dt[None, ..., 0],
        decay[:, 0, 0],
        into[None],
        out_of[None],
        D=D[:, 0],
        dt_bias=dt_bias[:, 0],
        cu_seqlens=torch.arange(len(slots) + 1),
        initial_states=state[slots],
        out=out[None],
        state_dtype=state.dtype,
    )
    state[slots] = states
