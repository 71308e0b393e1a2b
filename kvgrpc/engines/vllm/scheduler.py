"""The connector's half in vLLM's scheduler: which requests hand over which blocks. It has neither rank nor network.

vLLM calls it on the EngineCore's thread and dies of whatever it raises, so requests that say nonsense are left to vLLM.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request, RequestStatus

from kvgrpc.engines.vllm.groups import Group
from kvgrpc.engines.vllm.handoffs import Handoffs, Pages, Receive, Send
from kvgrpc.engines.vllm.samples import Samples
from kvgrpc.engines.vllm.stats import TransferStats
from kvgrpc.observability.logging import RateLimited

logger = logging.getLogger("vllm." + __name__)
# What decode answers, beside its tokens, where it computed a prompt that prefill was to compute.
UNUSED = "kvgrpc_prefill_unused"
# With which a proxy that has chosen decode already names its engine to prefill.
DECODE = "kvgrpc_decode"
_QUIET_SECONDS = 30.0
_COMPUTED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class Scheduler:
    """Collects what happened to requests since the last step, for the workers.

    Args:
        prefill: this engine computes prompts for others.
        groups: of layers, in the order of our pools; a block of vLLM is a page of ours.
        decode: it decodes prompts that others computed; None: it does where it does not compute them.
        reached: parameters with which decode finds this prefill, for proxies that pass on what prefill answers.
    """

    def __init__(
        self,
        prefill: bool,
        groups: Sequence[Group],
        decode: bool | None = None,
        reached: Mapping[str, str] | None = None,
    ) -> None:
        self._prefill = prefill
        self._decode = not prefill if decode is None else decode
        self._reached = dict(reached or {})
        self._groups = groups
        self._moves_on = any(group.moves_on for group in groups)
        self._has_state = any(group.has_state for group in groups)
        # Requests of prefill without the last token of their prompt.
        self._shortened: set[str] = set()
        self._next = Handoffs()
        # At decode: pages that requests wait for, and why others have none from prefill.
        self._awaited: dict[str, frozenset[int]] = {}
        self._unused: dict[str, str] = {}
        self._samples = Samples()
        self._stats = TransferStats()
        # A proxy that speaks another protocol does so for every request.
        self._lines = RateLimited(logger, lines=1, seconds=_QUIET_SECONDS)

    def on_new(self, request: Request) -> None:
        """With windows prefill leaves the last token of a prompt to decode, which computes it in any case: vLLM gives
        the block of the first token that it sees to others as soon as it is computed. With states too: decode needs
        the one before that token, and a state has no way back. The token that prefill then makes is not the prompt's
        next one.

        Decode names the room at once: while the request waits for its turn, prefill hears when decode is gone.
        """
        if self._samples.add_other(request.request_id):
            return
        wants = self._wants(request)
        if wants:
            self._next.queued[request.request_id] = _receive(request, {}, 0)
        if wants or self._gives(request):
            self._samples.add_first(request.request_id, str(request.kv_transfer_params["transfer_id"]), coming=wants)
        alone = request.num_prompt_tokens < 2 or request.prompt_token_ids is None or request.prompt_embeds is not None
        if not self._moves_on or alone or not self._gives(request) or request.get_skip_reading_prefix_cache():
            return
        request.prompt_token_ids = request.prompt_token_ids[:-1]
        request._all_token_ids.pop()
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
        self._shortened.add(request.request_id)

    def tokens_elsewhere(self, request: Request, computed: int) -> int | None:
        """Returns how many tokens of the prompt, behind the ``computed`` ones, prefill will hand over. None: ask again,
        they are on their way for another sample of the request."""
        if self._samples.waits(request.request_id):
            return None
        return max(0, self._handed_over(request) - computed) if self._wants(request) else 0

    def on_blocks(self, request: Request, blocks: KVCacheBlocks, elsewhere: int) -> None:
        """The request has blocks, with room for ``elsewhere`` tokens of its prompt that prefill hands over."""
        number, params = request.request_id, request.kv_transfer_params
        if self._wants(request):
            stop = self._handed_over(request)
            own = self._pages(blocks.get_block_ids(), stop - elsewhere, stop) if elsewhere else {}
            held = self._groups[0].pages_held(stop - elsewhere, stop)
            self._next.receives[number] = _receive(request, own, held)
            self._awaited[number] = frozenset(page for pages in own.values() for page in pages)
            self._next.queued.pop(number, None)
            if not elsewhere:
                self._samples.came(number)
            params["do_remote_prefill"] = False  # once; preempted later, it computes its prompt itself
        elif self._gives(request):
            self._next.announced[number] = str(params["transfer_id"])
            if params.get(DECODE):
                self._next.bound[number] = str(params[DECODE])

    def on_output(self, failed_pages: Iterable[int], failed_requests: Iterable[str], received: Iterable[str]) -> None:
        """Takes what the workers said of this step: vLLM fails who lost pages, or computes their prompts here."""
        lost, named = frozenset(failed_pages), frozenset(failed_requests)
        for number, pages in self._awaited.items():
            if number in named or pages & lost:
                self._leave(number, "hand_off_failed", "its hand-off failed: see the log of this engine's workers")
        for number in received:
            self._awaited.pop(number, None)
            self._samples.came(number)

    def on_finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """True if vLLM must keep the request's blocks, of each group, until its workers say that they were sent; and
        what the answer says of the hand-off.
        """
        number, params = request.request_id, request.kv_transfer_params
        self._awaited.pop(number, None)
        of_first = self._samples.end(number)
        if of_first is not None:  # a proxy of two steps gets the answer of the sample that ends last
            return False, self._answer(of_first) if self._prefill and _asks(request, "do_remote_decode") else None
        if self._wants(request):  # it never got blocks: prefill need not wait for it
            self._next.receives[number] = _receive(request, {}, 0, abort=True)
            self._next.queued.pop(number, None)
            params["do_remote_prefill"] = False
        elif self._gives(request):
            if request.status in _COMPUTED and any(blocks) and self._stopped_in_time(request):
                own = self._pages(blocks, 0, self._handed_over(request))
                self._shortened.discard(number)
                self._next.computed[number] = Send(str(params["transfer_id"]), own)
                return True, self._answer(str(params["transfer_id"]))
            self._shortened.discard(number)
            self._next.dropped[number] = str(params["transfer_id"])
        why = self._unused.pop(number, None)
        return False, None if why is None else {UNUSED: why}

    def take_stats(self) -> TransferStats | None:
        return self._stats.take()

    def take(self) -> Handoffs:
        handoffs, self._next = self._next, Handoffs()
        return handoffs

    def _handed_over(self, request: Request) -> int:
        """Tokens of the prompt; with windows or states all but the last. Both sides must say the same: the last pages
        of either are those of the same tokens.
        """
        return int(request.num_prompt_tokens) - (self._moves_on and request.request_id not in self._shortened)

    def _stopped_in_time(self, request: Request) -> bool:
        """False where a state has gone past what decode asks for: of prompts that are embeddings, or whose logprobs are
        wanted, prefill computes the last token too.
        """
        return not self._has_state or request.request_id in self._shortened or request.num_prompt_tokens < 2

    def _pages(self, blocks: Sequence[Sequence[int]], first: int, stop: int) -> Pages:
        return {group.pool: group.blocks_of(blocks, first, stop) for group in self._groups}

    def _wants(self, request: Request) -> bool:
        if not self._decode or self._samples.is_other(request.request_id) or not _asks(request, "do_remote_prefill"):
            return False
        missing = [name for name in _AT_DECODE if not request.kv_transfer_params.get(name)]
        if missing:
            request.kv_transfer_params["do_remote_prefill"] = False
            why = f"do_remote_prefill comes without {', '.join(missing)}, which a prefill with kvgrpc answers"
            self._leave(request.request_id, "parameters", why)
        return not missing

    def _gives(self, request: Request) -> bool:
        """Proxies of vLLM's Mooncake connector name the hand-off; those of NIXL leave that to prefill, which does."""
        other = self._samples.is_other(request.request_id)
        gives = self._prefill and not other and _asks(request, "do_remote_decode")
        if gives and not request.kv_transfer_params.get("transfer_id"):
            request.kv_transfer_params["transfer_id"] = secrets.token_hex(16)
        return gives

    def _answer(self, transfer_id: str) -> dict[str, Any]:
        """Returns what a proxy gives to decode as it is."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            **self._reached,
        }

    def _leave(self, number: str, reason: str, why: str) -> None:
        """Decode cannot use what prefill computed for the request: its answer, the statistics and the log say so."""
        if number not in self._unused:
            self._unused[number] = why
            self._stats.left(reason)
            text = f"kvgrpc: request {number} does not use what prefill computed: {why}"
            self._lines.warning(reason, text)


_AT_DECODE = ("transfer_id", "remote_bootstrap_addr")


def _asks(request: Request, what: str) -> bool:
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get(what))


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
