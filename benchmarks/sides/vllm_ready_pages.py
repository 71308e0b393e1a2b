"""A prefill of vLLM that computes nothing and has the pages of every prompt before it is asked: ``python -m
benchmarks.sides.vllm_ready_pages FD``, in the place of tests/engines/vllm_worker.py.

vLLM's EngineCore makes the pools and both halves of the connector, and takes no request: both halves are called here as
its scheduler and its worker call them, in steps without a batch.
"""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request, RequestStatus

from tests.engines.worker import Worker, main

STEP_SECONDS = 0.001
FIRST_TOKEN = 0


class ReadyPages(Worker):
    """Takes ``generate`` alone."""

    def _start(self, arguments: dict[str, Any]) -> asyncio.AbstractEventLoop:
        # Without a compiled model, which nobody will call, and with the worker in this process.
        config = AsyncEngineArgs(**{**arguments, "enforce_eager": True}).create_engine_config()
        self._core = EngineCore(config, UniProcExecutor, log_stats=False)
        self._block = config.cache_config.block_size
        self._scheduler, self._worker = self._core.scheduler.get_kv_connector(), get_kv_transfer_group()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        # No thread of either connector needs an orderly end; decode is ended too.
        self._engine = SimpleNamespace(shutdown=lambda: os._exit(0))
        loop = asyncio.new_event_loop()
        self._steps = loop.create_task(self._run())
        return loop

    async def _run(self) -> None:
        while True:
            self._step()
            await asyncio.sleep(STEP_SECONDS)

    def _step(self) -> None:
        self._worker.bind_connector_metadata(self._scheduler.build_connector_meta(SchedulerOutput.make_empty()))
        self._worker.start_load_kv(None)
        sent, _ = self._worker.get_finished(set())
        self._worker.clear_connector_metadata()
        for number in sent or ():
            self._waiting.pop(number).set_result(None)

    async def _generate(self, message: dict[str, Any]) -> None:
        number, prompt = str(message["id"]), message["ids"]
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": message["extra"]})
        request = Request(number, prompt, sampling, None)
        self._scheduler.on_new_request(request)
        self._scheduler.update_state_after_alloc(request, KVCacheBlocks(([],)), 0)
        self._step()
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        sent = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._scheduler.request_finished_all_groups(request, ([*range(1, 2 + (len(prompt) - 1) // self._block)],))
        await sent
        self._say(id=message["id"], t=time.monotonic(), tokens=[FIRST_TOKEN])


if __name__ == "__main__":
    main(ReadyPages)
