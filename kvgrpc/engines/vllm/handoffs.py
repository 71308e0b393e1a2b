"""The scheduler's words to its workers about hand-offs, once a step. Plain values: vLLM pickles them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

# Blocks of vLLM by the name of the pool that they are pages of, in the order of the prompt.
Pages = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Receive:
    """Decode wants the KV cache of a prompt.

    ``pages``: its own, for the prompt behind the ``first_page`` pages of the first pool that it holds already; none
    where it holds, or computes, everything, and prefill shall only hear that. ``abort``: nobody wants it any more.
    ``traceparent``: W3C trace context of the request, "" where vLLM does not trace.
    """

    transfer_id: str
    bootstrap_addr: str
    engine_id: str
    pages: Pages = field(default_factory=dict)
    first_page: int = 0
    abort: bool = False
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Send:
    """Prefill has computed a prompt. ``pages``: all that it has of it; vLLM holds them until it is told."""

    transfer_id: str
    pages: Pages


@dataclass(slots=True)
class Handoffs(KVConnectorMetadata):
    """By vLLM's request id. ``announced``: transfer ids whose prompts prefill begins to compute; ``dropped``: of those
    that it will not compute; ``queued``: what came to decode and has no blocks yet. ``bound``: of the announced ones
    the engine whose decode alone may have it, where the request names one.
    """

    announced: dict[str, str] = field(default_factory=dict)
    bound: dict[str, str] = field(default_factory=dict)
    computed: dict[str, Send] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    receives: dict[str, Receive] = field(default_factory=dict)
    queued: dict[str, Receive] = field(default_factory=dict)
