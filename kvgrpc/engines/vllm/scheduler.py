"""The connector's half in vLLM's scheduler: which requests hand over which blocks. It has neither rank nor network.

vLLM calls it on the EngineCore's thread and dies of whatever it raises, so requests that say nonsense are left to vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request, RequestStatus

from kvgrpc.engines.vllm.groups import Group
from kvgrpc.engines.vllm.handoffs import Handoffs, Pages, Receive, Send

logger = logging.getLogger("vllm." + __name__)
_COMPUTED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class Scheduler:
    """Collects what happened to requests since the last step, for the workers.

    Args:
        prefill: this engine computes prompts for others; else it decodes prompts that others computed.
        groups: of layers, in the order of our pools; a block of vLLM is a page of ours.
    """

    def __init__(self, prefill: bool, groups: Sequence[Group]) -> None:
        self._prefill = prefill
        self._groups = groups
        self._has_window = any(group.has_window for group in groups)
        # Requests of prefill without the last token of their prompt.
        self._shortened: set[str] = set()
        self._next = Handoffs()

    def on_new(self, request: Request) -> None:
        """With windows prefill leaves the last token of a prompt to decode, which computes it in any case: vLLM gives
        the block of the first token that it sees to others as soon as it is computed. The token that prefill then
        makes is not the prompt's next one.
        """
        alone = request.num_prompt_tokens < 2 or request.prompt_token_ids is None or request.prompt_embeds is not None
        if not self._has_window or alone or not self._gives(request) or request.get_skip_reading_prefix_cache():
            return
        request.prompt_token_ids = request.prompt_token_ids[:-1]
        request._all_token_ids.pop()
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
        self._shortened.add(request.request_id)

    def tokens_elsewhere(self, request: Request, computed: int) -> int:
        """How many tokens of the prompt, behind the ``computed`` ones, prefill will hand over."""
        return max(0, self._handed_over(request) - computed) if self._wants(request) else 0

    def on_blocks(self, request: Request, blocks: KVCacheBlocks, elsewhere: int) -> None:
        """The request has blocks, with room for ``elsewhere`` tokens of its prompt that prefill hands over."""
        number, params = request.request_id, request.kv_transfer_params
        if self._wants(request):
            stop = self._handed_over(request)
            own = self._pages(blocks.get_block_ids(), stop - elsewhere, stop) if elsewhere else {}
            held = (stop - elsewhere) // self._groups[0].block_tokens if elsewhere else self._groups[0].pages(stop)
            self._next.receives[number] = _receive(request, own, held)
            params["do_remote_prefill"] = False  # once; preempted later, it computes its prompt itself
        elif self._gives(request):
            self._next.announced[number] = str(params["transfer_id"])

    def on_finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> bool:
        """Whether vLLM must keep the request's blocks, of each group, until its workers say that they were sent."""
        number, params = request.request_id, request.kv_transfer_params
        if self._wants(request):  # it never got blocks: prefill need not wait for it
            self._next.receives[number] = _receive(request, {}, 0, abort=True)
            params["do_remote_prefill"] = False
        elif self._gives(request):
            if request.status in _COMPUTED and any(blocks):
                own = self._pages(blocks, 0, self._handed_over(request))
                self._shortened.discard(number)
                self._next.computed[number] = Send(str(params["transfer_id"]), own)
                return True
            self._shortened.discard(number)
            self._next.dropped[number] = str(params["transfer_id"])
        return False

    def take(self) -> Handoffs:
        handoffs, self._next = self._next, Handoffs()
        return handoffs

    def _handed_over(self, request: Request) -> int:
        """Tokens of the prompt; with windows all but the last. Both sides must say the same: the last pages of either
        are those of the same tokens.
        """
        return int(request.num_prompt_tokens) - (self._has_window and request.request_id not in self._shortened)

    def _pages(self, blocks: Sequence[Sequence[int]], first: int, stop: int) -> Pages:
        return {group.pool: group.blocks_of(blocks, first, stop) for group in self._groups}

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


def _receive(request: Request, pages: Pages, first_page: int, abort: bool = False) -> Receive:
    params: Mapping[str, Any] = request.kv_transfer_params
    headers = request.trace_headers or {}  # vLLM keeps them where it traces itself (--otlp-traces-endpoint)
    return Receive(
        str(params["transfer_id"]),
        str(params["remote_bootstrap_addr"]),
        str(params.get("remote_engine_id") or ""),
        pages,
        first_page,
        abort,
        str(headers.get("traceparent", "")),
    )
