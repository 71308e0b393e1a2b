"""PrefetchService inside vLLM: a tier of vLLM's offloading that stores nothing and takes orders.

vLLM lets a tier look chunks up in all tiers but itself, and promotes to host memory what another one has. So orders
have a tier of their own. It stands in ``secondary_tiers`` beside those whose chunks it orders; docs/engines/vllm.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.cpu import manager as vllm_host
from vllm.v1.kv_offload.tiering.base import JobResult, ParentManager, SecondaryTierManager, TransferJob

from kvgrpc.engines.addresses import for_rank
from kvgrpc.engines.compatibility import ORDERS, STORAGE, VLLM, check
from kvgrpc.engines.identity import identity
from kvgrpc.engines.vllm.offload.common import attention_facts, axes_of, note_request
from kvgrpc.engines.vllm.offload.engine_core import EngineCore
from kvgrpc.engines.vllm.offload.keys import ChunkNames
from kvgrpc.engines.vllm.offload.lending import LentChunks
from kvgrpc.engines.vllm.offload.outcomes import Outcomes
from kvgrpc.engines.vllm.offload.promotion import Promotion
from kvgrpc.engines.vllm.offload.questions import Questions, looking
from kvgrpc.engines.vllm.offload.served import OffloadedCache, holds_promotions, is_full
from kvgrpc.engines.vllm.offload.windows import WindowChunks
from kvgrpc.engines.vllm.tier import KvGrpcTier, identity_of, keep_mapped
from kvgrpc.errors import Failure, FeatureDisabled, InvalidRequest, StorageFailed
from kvgrpc.hashing import vllm_event_hash
from kvgrpc.model import Layout, ModelIdentity, RankRef, Role
from kvgrpc.net import split
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.prefetch.model import Namespace, OperationState, PrefetchLimits, Stop
from kvgrpc.prefetch.orders import EngineOrders
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.storage.keys import KeyMode, Keys
from kvgrpc.pull.common import CommonPages
from kvgrpc.pull.lending.lender import LentPages
from kvgrpc.pull.names import NotedNames
from kvgrpc.pull.taking.peers import PeersBackend
from kvgrpc.server import RankConfig, open_cache, settings

logger = logging.getLogger("vllm." + __name__)
_PROMOTIONS = 8
# Whose ends vLLM sees to in one step.
_CHUNKS_AT_ONCE = 4_096
_CLOSE_SECONDS = 2.0
_HUNG_SECONDS = 30.0
_SAY_SECONDS = 5.0
# Of pages whose prompts were met: other engines may have them when the host does not any more.
_LEAST_NAMES = 65_536
# Of the environment, which the engine's workers share, that which is theirs alone.
_OF_RANKS = (
    "KVGRPC_ENGINE",
    "KVGRPC_PULL",
    "KVGRPC_LISTEN",
    "KVGRPC_ADVERTISE",
    "KVGRPC_ADMIN_LISTEN",
    "KVGRPC_METRICS_LISTEN",
)


class KvGrpcOrders(SecondaryTierManager):
    """Prefetches for the tiers beside it. An order that goes wrong ends with its failure; the engine goes on."""

    # Questions need no step of the engine; promotions do, and wake it.
    tolerates_off_thread_polling = True

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        engine: str,
        limits: Mapping[str, Any] | None = None,
        model_name: str = "",
        backpressure_detector: Any = None,
        **more: Any,
    ) -> None:
        """``engine``: the name by which routers and people find this cache; ``limits``: fields of PrefetchLimits;
        ``more``: ``listen``, ``registry`` and the other settings of a rank.

        Raises InvalidRequest, FeatureDisabled, AddressNotAllowed: vLLM then does not start.
        """
        check(VLLM, STORAGE, ORDERS)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._core = EngineCore.of_caller()
        self._names = ChunkNames(offloading_spec, self._core.config)
        assert primary_kv_view.shape is not None
        self._chunks = primary_kv_view.shape[0]
        self._orders = EngineOrders(limits_of(limits), self._names.page_tokens, self._core.wake)
        # vLLM's polling thread comes to them each millisecond, where it has one.
        polled = getattr(offloading_spec, "tier_poll_interval_s", 1.0) > 0
        self._questions = Questions((lambda: None) if polled else self._core.wake)
        self._polled, self._served_at, self._closed = polled, time.monotonic(), False
        self._outcomes = Outcomes(self._orders)
        self._promotions: list[Promotion] = []
        # With the chunks of each; filled by threads that lend, too.
        self._finished: deque[tuple[JobResult, int]] = deque()
        self._drained = False
        self._stepped = False
        self._lines = RateLimited(logger)
        self._address = np.asarray(primary_kv_view).ctypes.data
        self._lent = LentChunks(self._questions, self._names, self._address, self.block_size_bytes, self._done)
        config = config_of(offloading_spec, engine, model_name, more)
        # Of prompts that requests bring; None: chunks are for engines like this one alone.
        self._common: NotedNames | None = None
        pulls = None if config.pull is None else self._pulls(offloading_spec)
        self._server = open_cache(config, lambda rank: self._cache(rank, offloading_spec), pulls)

    # vLLM asks as of any tier.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._common is not None:
            note_request(self._common, self._core.request(req_context.req_id), self._names.hashes_of_page)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._finished.append((JobResult(job_metadata.job_id, success=False), 0))

    def submit_store(self, job_metadata: TransferJob) -> None:
        """It has no place to store to, so that is done at once."""
        self._done(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Some, for vLLM looks at each chunk of them now; all once they were drained."""
        found, left = list[JobResult](), _CHUNKS_AT_ONCE
        while self._finished and (left > 0 or self._drained):
            result, chunks = self._finished.popleft()
            found.append(result)
            left -= chunks
        self._drained = False
        return found

    def has_pending_work(self) -> bool:
        return bool(self._promotions or self._orders.waiting or self._finished or len(self._questions))

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Notes what a request took from the host: vLLM's own manager remembers it."""
        access = getattr(vllm_host, "_RequestCacheAccess", None)
        found = None if access is None else req_context.get_state(access)
        self._outcomes.on_used(getattr(found, "reused_keys", ()))

    def on_schedule_end(self, context: Any) -> None:
        self._stepped = True

    def drain_jobs(self) -> None:
        """vLLM empties the host: what is pinned there is let go, once nothing of it is copied.

        Raises StorageFailed where something is copied for too long: vLLM then empties nothing.
        """
        end, what = time.monotonic() + _HUNG_SECONDS, "chunks are still being copied for another engine"
        while not self._lent.wait_idle(_SAY_SECONDS):
            logger.error("kvgrpc: vLLM waits to empty its host cache: %s", what)
            if time.monotonic() >= end:
                text = f"vLLM's host cache cannot be emptied now: {what} after {_HUNG_SECONDS:g} s; try again"
                raise StorageFailed(text, metadata={"backend": "vLLM", "status": "TIMEOUT"})
        for promotion in self._promotions:
            self._let_go(promotion)
            promotion.lose()
        self._drained = True

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed, copied = True, False
        try:
            copied = self._server.close(_CLOSE_SECONDS)
        finally:
            if not copied:
                keep_mapped(self._primary_kv_view)
                logger.error("kvgrpc: chunks may still be copied, so vLLM's host cache stays mapped")
            self._orders.shut_down()
            if self._common is not None:
                self._common.close()

    # Orders, under vLLM's lock.

    def serve_external_requests(self, parent: ParentManager) -> None:
        """Nothing may be raised here: it would end the engine."""
        self._served_at = time.monotonic()
        self._questions.answer(parent)
        if self._orders.waiting:
            self._orders.expire()
        if not self._stepped:
            return  # only a step moves a promotion
        self._stepped = False
        if self._outcomes.due:
            self._look(parent)
        # An order that began meanwhile would find that no tier has anything; it waits, until its deadline.
        free = 0 if holds_promotions(parent) else _PROMOTIONS - len(self._promotions)
        for _ in range(free):
            operation = self._orders.take()
            if operation is None:
                break
            try:
                self._begin(operation, parent)
            except Exception as error:
                self._fail(operation, parent, error)
        self._move_on(parent)

    def _move_on(self, parent: ParentManager) -> None:
        """vLLM forgets each chunk of what ends: those behind long ones that end wait for the next step."""
        sharing, left = len(self._promotions), _CHUNKS_AT_ONCE
        for promotion in list(self._promotions):
            try:
                self._step(promotion, parent, sharing)
            except Exception as error:
                self._fail(promotion.operation, parent, error)
            left -= 0 if promotion in self._promotions else len(promotion.operation.hashes)
            if left <= 0:
                return

    def _look(self, parent: ParentManager) -> None:
        try:
            with looking(parent) as look:
                self._outcomes.look(lambda key: look(key) is not LookupResult.MISS)
        except Exception as error:
            text = one_line(f"{type(error).__name__}: {error}")
            self._lines.exception("outcomes", f"kvgrpc: what became of chunks is not known: {text}")

    def _begin(self, operation: Operation, parent: ParentManager) -> None:
        """In a time that does not depend on how long the prompt is, as each step of the promotion after it."""
        if self._room() < 1:
            self._orders.end(operation, OperationState.DECLINED, Stop.RATE_LIMITED)
            return
        windows = WindowChunks(self._names, operation.hashes) if self._names.windows else None
        # With windows the device has less than the leading chunks say, how much less is no matter of a step.
        on_device = self._core.leading_on_device if windows is None else lambda keys: 0
        promotion = Promotion(
            operation,
            self._names.keys,
            self._orders,
            self._room,
            self.block_size_bytes,
            self._names.page_tokens,
            lambda: is_full(parent),
            on_device,
            windows,
        )
        self._promotions.append(promotion)
        promotion.begin(parent)

    def _room(self, promotion: Promotion | None = None) -> int:
        """Of the share of all promotions: chunks that the others leave."""
        held = sum(each.held for each in self._promotions if each is not promotion)
        return int(self._orders.limits.occupancy * self._chunks) - held

    def _step(self, promotion: Promotion, parent: ParentManager, sharing: int) -> None:
        over = promotion.step(parent, sharing)
        self._outcomes.follow(promotion.operation, promotion.came())
        if over:
            self._end(promotion)

    def _fail(self, operation: Operation, parent: ParentManager, error: Exception) -> None:
        text = one_line(f"{type(error).__name__}: {error}")
        self._lines.exception("order", f"kvgrpc: order {operation.operation_id} failed: {text}")
        for promotion in [each for each in self._promotions if each.operation is operation]:
            self._end(promotion)
            with contextlib.suppress(Exception):  # vLLM may have forgotten it before
                promotion.abandon(parent)
        failure = Failure.of(StorageFailed(text, metadata={"backend": "vLLM", "status": "FAILED"}))
        self._orders.end(operation, OperationState.FAILED, failure=failure)

    def _end(self, promotion: Promotion) -> None:
        self._promotions.remove(promotion)
        self._let_go(promotion)

    def _let_go(self, promotion: Promotion) -> None:
        jobs, promotion.pinned = promotion.pinned, []
        for job in jobs:
            self._done(job)

    def _done(self, job: TransferJob) -> None:
        self._finished.append((JobResult(job.job_id, success=True, transfer_bytes=0), len(job.keys)))

    def _is_well(self) -> bool:
        """True if vLLM comes to this tier; where it has no thread for that, an idle engine does not."""
        return not self._closed and (not self._polled or time.monotonic() - self._served_at < _HUNG_SECONDS)

    def _pulls(self, spec: Any) -> tuple[LentPages, PeersBackend]:
        """Returns what is lent, and by which tier the chunks of others are asked for. Raises InvalidRequest,
        FeatureDisabled."""
        if self._names.windows:
            remedy = "this model without pull in its tier"
            raise FeatureDisabled(
                f"chunks of an engine with sliding windows are not lent to others; use {remedy}",
                metadata={"feature": "pulls of models with sliding windows", "howToEnable": remedy},
            )
        taking = [tier.peers for tier in KvGrpcTier.opened if tier.address == self._address]
        peers = next((each for each in taking if each is not None), None)
        if peers is None:
            raise InvalidRequest.of("pull", "given", "a KvGrpcTier with peers before this tier in secondary_tiers")
        identity = identity_of(spec, self.block_size_bytes)
        keys = Keys(KeyMode.KVGRPC, identity)
        common = self._common_pages(spec)
        sizes = self.block_size_bytes, self._names.page_tokens
        found = LentPages(self._lent, keys, *sizes, identity.dtype, common=common, event_hash=vllm_event_hash)
        return found, peers

    def _common_pages(self, spec: Any) -> CommonPages | None:
        workers = self._core.of_workers(attention_facts)
        axes = axes_of(spec, self._core.config, workers, self.block_size_bytes)
        if axes is None:
            logger.info("kvgrpc: pages are exchanged with vLLM engines alone: the order of bytes of these is not known")
            return None
        self._common = NotedNames(self._names.page_tokens, max(_LEAST_NAMES, 2 * self._chunks))
        return CommonPages(axes, self._common, heads_total=axes.heads)

    def _cache(self, rank: RankRef, spec: Any) -> OffloadedCache:
        found = identity_of(spec, self.block_size_bytes)
        layout = f"vllm-{hashlib.sha256(found.layout.encode()).hexdigest()[:8]}"
        namespace = Namespace(found.model, found.dtype, layout, self._names.page_tokens)
        return OffloadedCache(
            rank,
            namespace,
            self._names,
            self._orders,
            self._questions,
            self._core,
            self._chunks,
            self.block_size_bytes,
            self._address,
            self._is_well,
            self._common,
        )


def limits_of(given: Mapping[str, Any] | None) -> PrefetchLimits:
    """Raises InvalidRequest for a key that is none."""
    known = {each.name for each in fields(PrefetchLimits)}
    for name, value in (given or {}).items():
        if name not in known:
            raise InvalidRequest.of(f"limits.{name}", value, f"one of {', '.join(sorted(known))}")
    return PrefetchLimits(**(given or {}))


def config_of(spec: Any, engine: str, model_name: str, more: Mapping[str, Any]) -> RankConfig:
    """Of what the tier was given, over the environment, over what vLLM says. Raises InvalidRequest."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    # A table is read as the text of one.
    flat = {name: json.dumps(value) if isinstance(value, Mapping) else value for name, value in more.items()}
    given = settings(flat, environment)
    parallel = spec.config.parallel
    dp, size = parallel.data_parallel_index, parallel.data_parallel_size
    if dp and "listen" in given:
        given["listen"] = for_rank(given["listen"], dp, "listen")
    port = split(given.get("advertise") or "")[1]
    # A replica with a configuration of its own names the port at which it listens.
    if dp and port and port != split(given.get("listen") or "")[1]:
        given["advertise"] = for_rank(given["advertise"], dp, "advertise")
    if dp and size == 1:  # replicas of a dense model are engines of their own for vLLM
        engine = f"{engine}-dp{dp}"
    found: ModelIdentity = identity(
        spec.config.model.name, None, spec.config.model.dtype, spec.config.model.dtype, mla=False, name=model_name
    )
    facts = {
        "engine": engine,
        "role": Role.UNIFIED,
        "pools": (),
        "layout": Layout(dp=size),
        "dp": dp if size > 1 else 0,
        # Of the kind of attention vLLM's offloading says nothing.
        "model": ModelIdentity(found.name, found.revision, found.cache_dtype),
    }
    return RankConfig(**{"registry": "", **given, **facts})
