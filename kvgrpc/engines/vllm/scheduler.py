"""The connector's half in vLLM's scheduler: which requests hand over which blocks. It has neither rank nor network.

vLLM calls it on the EngineCore's thread and dies of whatever it raises, so requests that say nonsense are left to vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request, RequestStatus

from kvgrpc.engines.vllm.handoffs import Handoffs, Receive, Send

logger = logging.getLogger("vllm." + __name__)
_COMPUTED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class Scheduler:
    """Collects what happened to requests since the last step, for the workers.

    Args:
        prefill: this engine computes prompts for others; else it decodes prompts that others computed.
        block_tokens: tokens of a block of vLLM, which is a page of ours.
    """

    def __init__(self, prefill: bool, block_tokens: int) -> None:
        self._prefill = prefill
        self._block_tokens = block_tokens
        self._next = Handoffs()

    def tokens_elsewhere(self, request: Request, computed: int) -> int:
        """How many tokens of the prompt, behind the ``computed`` ones, prefill will hand over."""
        return max(0, request.num_prompt_tokens - computed) if self._wants(request) else 0

    def on_blocks(self, request: Request, blocks: KVCacheBlocks, elsewhere: int) -> None:
        """The request has blocks, with room for ``elsewhere`` tokens of its prompt that prefill hands over."""
        number, params = request.request_id, request.kv_transfer_params
        if self._wants(request):
            pages, first = self._pages(request), (request.num_prompt_tokens - elsewhere) // self._block_tokens
            own = blocks.get_block_ids()[0][first:pages] if elsewhere else ()
            self._next.receives[number] = _receive(request, own, first if elsewhere else pages)
            params["do_remote_prefill"] = False  # once; preempted later, it computes its prompt itself
        elif self._gives(request):
            self._next.announced[number] = str(params["transfer_id"])

    def on_finished(self, request: Request, blocks: Sequence[int]) -> bool:
        """Whether vLLM must keep the request's blocks until its workers say that they were sent."""
        number, params = request.request_id, request.kv_transfer_params
        if self._wants(request):  # it never got blocks: prefill need not wait for it
            self._next.receives[number] = _receive(request, (), 0, abort=True)
            params["do_remote_prefill"] = False
        elif self._gives(request):
            if request.status in _COMPUTED and blocks:
                self._next.computed[number] = Send(str(params["transfer_id"]), tuple(blocks[: self._pages(request)]))
                return True
            self._next.dropped[number] = str(params["transfer_id"])
        return False

    def take(self) -> Handoffs:
        handoffs, self._next = self._next, Handoffs()
        return handoffs

    def _pages(self, request: Request) -> int:
        return -(-int(request.num_prompt_tokens) // self._block_tokens)

    def _wants(self, request: Request) -> bool:
        return not self._prefill and _asks(request, "do_remote_prefill", "transfer_id", "remote_bootstrap_addr")

    def _gives(self, request: Request) -> bool:
        return self._prefill and _asks(request, "do_remote_decode", "transfer_id")


def _asks(request: Request, what: str, *needed: str) -> bool:
    params = request.kv_transfer_params
    if not isinstance(params, dict) or not params.get(what):
        return False
    missing = [name for name in needed if not params.get(name)]
    if missing:
        logger.warning("request %s says %s without %s: it stays here", request.request_id, what, ", ".join(missing))
        params[what] = False
    return not missing


def _receive(request: Request, pages: Sequence[int], first_page: int, abort: bool = False) -> Receive:
    params: Mapping[str, Any] = request.kv_transfer_params
    headers = request.trace_headers or {}  # vLLM keeps them where it traces itself (--otlp-traces-endpoint)
    return Receive(
        str(params["transfer_id"]),
        str(params["remote_bootstrap_addr"]),
        str(params.get("remote_engine_id") or ""),
        tuple(pages),
        first_page,
        abort,
        str(headers.get("traceparent", "")),
    )
