"""A prefill of SGLang without a model, which has the pages of every prompt before it is asked: ``python -m
benchmarks.sides.sglang_ready_pages FD``, in the place of tests/engines/worker.py.

Bootstrap server, manager and senders are those that SGLang takes for this transfer backend, over pools of the model's
shape; SGLang's own queue describes the pools and makes the senders. Keys, values and first tokens are zeros.
"""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    maybe_init_shared_mooncake_transfer_engine,
)
from sglang.srt.managers.disagg_service import start_disagg_service
from sglang.srt.mem_cache.common import kv_to_page_num
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_disagg, get_model, process_model_config, publish
from sglang.srt.server_args import ServerArgs

from tests.engines.worker import Worker, main

POLL_SECONDS = 0.001
FIRST_TOKEN = 0
# Of the buffers that carry the first token, without drafts.
HIDDEN_SIZE = 16


class ReadyPages(Worker):
    """Takes ``generate`` alone."""

    def _start(self, arguments: dict[str, Any]) -> asyncio.AbstractEventLoop:
        load_plugins()
        engine = ServerArgs(**arguments)
        context = publish(engine, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        context.parallel.override_permanently(pp_group=SimpleNamespace(world_size=1, rank_in_group=0))
        self._bootstrap = start_disagg_service()
        maybe_init_shared_mooncake_transfer_engine(gpu_id=0)
        self._queue, self._page = queue_of(engine), engine.page_size
        # No thread of either backend needs an orderly end; decode is ended too.
        self._engine = SimpleNamespace(shutdown=lambda: os._exit(0))
        return asyncio.new_event_loop()

    async def _generate(self, message: dict[str, Any]) -> None:
        queue, request = self._queue, request_of(message)
        if not queue.create_sender(request, 0):
            raise RuntimeError(f"a prompt of {len(message['ids'])} tokens does not fit")
        sender = request.disagg_kv_sender
        await reach(sender, KVPoll.WaitingForInput)
        if not queue.finalize_bootstrap(request):
            raise RuntimeError("no row is free for the first token")
        queue.metadata_buffers.set_buf(request)
        sender.send(np.arange(1, 1 + kv_to_page_num(len(message["ids"]), self._page), dtype=np.int32))
        await reach(sender, KVPoll.Success)
        sender.clear()
        queue.req_to_metadata_buffer_idx_allocator.free(request.metadata_buffer_index)
        self._say(id=message["id"], t=time.monotonic(), tokens=[FIRST_TOKEN])


def queue_of(engine: ServerArgs) -> PrefillBootstrapQueue:
    """SGLang's, over pages of zeros; of the scheduler that it expects it reads what describes the engine."""
    model, tokens, rows = process_model_config(), engine.max_total_tokens, 2 * engine.max_running_requests
    heads, layers = model.get_num_kv_heads(1), model.num_hidden_layers
    pool = MHATokenToKVPool(
        tokens, engine.page_size, model.dtype, heads, model.head_dim, layers, "cpu", enable_memory_saver=False
    )
    runner = SimpleNamespace(
        effective_logical_max_total_num_tokens=tokens, kv_cache_dtype_str=get_model().kv_cache_dtype
    )
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner),
        kv_shard_widening=1,
        token_to_kv_pool_allocator=pool,  # for its page size
        rust_server=None,
        server_args=engine,
        model_config=model,
    )
    return PrefillBootstrapQueue(
        token_to_kv_pool=pool,
        draft_token_to_kv_pool=None,
        req_to_metadata_buffer_idx_allocator=utils.ReqToMetadataIdxAllocator(rows),
        metadata_buffers=utils.MetadataBuffers(
            rows, HIDDEN_SIZE, torch.float32, max_sampling_mask_tokens=engine.sampling_mask_max_tokens
        ),
        gpu_id=0,
        bootstrap_port=engine.disaggregation_bootstrap_port,
        max_total_num_tokens=tokens,
        scheduler=scheduler,
        scheduler_stage_metrics=None,
        transfer_backend=utils.TransferBackend(get_disagg().disaggregation_transfer_backend),
    )


def request_of(message: dict[str, Any]) -> Any:
    """As much of SGLang's request as its queue and its buffers of first tokens look at."""
    return SimpleNamespace(
        rid=str(message["id"]),
        origin_input_ids=message["ids"],
        bootstrap_host=message["extra"]["bootstrap_host"],
        bootstrap_room=message["extra"]["bootstrap_room"],
        disagg_prefill_dp_rank=None,
        metadata_buffer_index=-1,
        sampling_params=SimpleNamespace(),
        time_stats=SimpleNamespace(set_bootstrap_done_time=lambda: None),
        output_ids=[FIRST_TOKEN],
        **dict.fromkeys(("cached_tokens", "cached_tokens_device", "cached_tokens_host", "cached_tokens_storage"), 0),
        get_mm_token_counts=lambda: (0, 0, 0),
        return_logprob=False,
        return_sampling_mask=False,
        hidden_states_tensor=None,
    )


async def reach(sender: Any, state: KVPoll) -> None:
    """Polls until then, as SGLang's scheduler does between two batches. Raises the reason of a failure."""
    while (now := sender.poll()) < state:
        if now == KVPoll.Failed:
            sender.failure_exception()
        await asyncio.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main(ReadyPages)
