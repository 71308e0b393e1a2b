"""The connector's half in each of vLLM's workers: a kvgrpc rank, with kv_both two, and the hand-offs of its requests.

Made when vLLM has allocated the KV cache. After that vLLM calls it on the worker's thread, in every step: nothing but
``close`` blocks, and nothing raises.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection, Mapping
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tensor_model_parallel_rank

from kvgrpc.engines.addresses import registry_of
from kvgrpc.engines.vllm.bootstrap import Bootstrap
from kvgrpc.engines.vllm.groups import KV, groups_of
from kvgrpc.engines.vllm.handoffs import Handoffs, Receive
from kvgrpc.engines.vllm.rank import WorkerProcess, bootstrap_address, model_of, pools_of, rank_config
from kvgrpc.engines.vllm.rooms import Receiving, Sending
from kvgrpc.engines.vllm.stats import TransferStats
from kvgrpc.model import Role
from kvgrpc.server import Rank, RankConfig, open_rank
from kvgrpc.transfer import Align, KVReceiver, KVSender, room_from_transfer_id

logger = logging.getLogger("vllm." + __name__)
# vLLM kills a worker that takes more than 5 s.
_CLOSE_SECONDS = 2.0


class Worker:
    """Blocks until its ranks are open. Raises what open_rank raises, FeatureDisabled for memory it cannot serve."""

    def __init__(self, config: Any, kv_cache_config: Any, caches: Mapping[str, torch.Tensor]) -> None:
        tp_rank, stage = get_tensor_model_parallel_rank(), get_pp_group().rank_in_group
        context = get_pcp_group().rank_in_group
        place = WorkerProcess(config, tp_rank, os.environ, stage=stage, context=context)
        pools = pools_of(caches, config, kv_cache_config, tp_rank)
        self._external = place.external
        self._page_bytes = {pool.name: pool.page_bytes for pool in pools}
        # Windows and states are of a prompt's end. Where all of it is sent, blocks of the two sides may differ in size.
        groups = groups_of(kv_cache_config, config.parallel_config.decode_context_parallel_size)
        self._align = Align.HEAD if len(groups) == 1 and not groups[0].moves_on else Align.TAIL
        self._fails_pages = len(groups) == 1 and not groups[0].has_state
        self._sending: dict[str, Sending] = {}
        self._receiving: dict[str, Receiving] = {}
        # Rooms of requests that wait for blocks.
        self._queued: dict[str, KVReceiver] = {}
        self._failed_pages: set[int] = set()
        self._failed_requests: set[str] = set()
        self._stats = TransferStats()
        self._bootstrap: Bootstrap | None = None
        if place.serves_registry:
            security, ttl = place.configured.get("server_security"), place.configured.get("lease_ttl", 10.0)
            limits = place.configured.get("call_limits")
            engine_id = config.kv_transfer_config.engine_id
            self._bootstrap = Bootstrap(place.bootstrap, engine_id, security, ttl, limits).open()
        self._ranks: list[Rank[Any]] = []
        # A PrefillManager and a DecodeManager, as the rooms of each role expect.
        self._transfers: dict[Role, Any] = {}
        try:
            for role in place.roles:
                own = WorkerProcess(config, tp_rank, os.environ, role, stage, context)
                self._open(role, rank_config(own, pools, model_of(config, pools[0], own)))
        except BaseException:
            self.close()
            raise

    def _open(self, role: Role, config: RankConfig) -> None:
        rank = open_rank(config)
        self._ranks.append(rank)
        self._transfers[role] = rank.transfer
        logger.info("kvgrpc: %s rank %s listens on %s", role.name.lower(), rank.ref, rank.address)

    def close(self) -> None:
        end = time.monotonic() + _CLOSE_SECONDS
        with contextlib.ExitStack() as closing:  # each, even where another one cannot be closed
            if self._bootstrap is not None:
                closing.callback(self._bootstrap.close)
            for rank in reversed(self._ranks):
                closing.callback(_close_until, rank, end)

    def take_on(self, handoffs: Handoffs) -> None:
        """Begins what the scheduler said of this step."""
        for number, transfer_id in handoffs.announced.items():
            self._sending_of(number, transfer_id, handoffs.bound.get(number, ""))
        for number, send in handoffs.computed.items():
            self._sending_of(number, send.transfer_id).send(send.pages)
        for number, transfer_id in handoffs.dropped.items():
            self._sending_of(number, transfer_id).room.abort("prefill gave the request up")
            del self._sending[number]
        for number, queued in handoffs.queued.items():
            self._queued[number] = self._receiver(queued)
        for number, receive in handoffs.receives.items():
            receiver = self._queued.pop(number, None) or self._receiver(receive)
            self._receiving[number] = Receiving(receiver, receive.pages, receive.first_page, receive.abort)

    def finished(self, ended_requests: Collection[str]) -> tuple[set[str], set[str]]:
        """Requests whose pages were sent, and whose pages are no longer written to, each once.

        ``ended_requests``: vLLM is through with them; one that still waits for its pages was given up.
        """
        for number in self._receiving.keys() & ended_requests:
            self._receiving[number].give_up()
        return self._sent(), self._received()

    def take_failed_pages(self) -> set[int]:
        """Pages of hand-offs that failed since the last call; vLLM fails or recomputes the requests that own them."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests whose hand-offs failed since the last call, where a page number alone does not say of how many
        tokens it is: there are several groups of layers, or it is a state."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_stats(self) -> TransferStats | None:
        return self._stats.take()

    def _sent(self) -> set[str]:
        over = {number: sending for number, sending in self._sending.items() if sending.over}
        for number, sending in over.items():
            del self._sending[number]
            self._count_ended(number, sending)
            sending.room.close()
        return set(over)

    def _received(self) -> set[str]:
        waited_for = set()
        for number, receiving in list(self._receiving.items()):
            if receiving.failed:
                receiving.told_failure = True
                self._fail(number, receiving)
                self._count_ended(number, receiving)
            if receiving.over:
                del self._receiving[number]
                if receiving.room.failure is None:
                    self._count_ended(number, receiving)
                receiving.room.close()
                if receiving.awaited:
                    waited_for.add(number)
        return waited_for

    def _fail(self, number: str, receiving: Receiving) -> None:
        if self._fails_pages:
            self._failed_pages.update(receiving.pages.get(KV, ()))
        else:
            self._failed_requests.add(number)

    def _sending_of(self, number: str, transfer_id: str, decode: str = "") -> Sending:
        """A request that was preempted is announced again."""
        if number not in self._sending:
            room = room_from_transfer_id(transfer_id)
            sender = KVSender(self._transfers[Role.PREFILL], "", room, decode=decode)
            self._sending[number] = Sending(sender, self._align)
        return self._sending[number]

    def _receiver(self, receive: Receive) -> KVReceiver:
        where = registry_of(bootstrap_address(receive.bootstrap_addr), self._external)
        room = room_from_transfer_id(receive.transfer_id)
        return KVReceiver(self._transfers[Role.DECODE], where, room, traceparent=receive.traceparent)

    def _count_ended(self, number: str, handoff: Sending | Receiving) -> None:
        failure = handoff.room.failure
        if failure is None:
            nbytes = sum(len(pages) * self._page_bytes[pool] for pool, pages in handoff.pages.items())
            self._stats.succeeded(time.monotonic() - handoff.began, nbytes)
        else:
            self._stats.failed(failure.reason.name)
            what = f"{failure.reason.name}: {failure.message} (seen by {failure.origin or 'this rank'})"
            logger.warning("kvgrpc: hand-off of request %s, room %d: %s", number, handoff.room.room, what)


def _close_until(rank: Rank[Any], end: float) -> None:
    rank.close(max(0.0, end - time.monotonic()))
