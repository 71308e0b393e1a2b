"""One real vLLM engine in a session of its own: ``python -m tests.engines.vllm_worker FD``. See worker.py."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.engines.worker import Worker, main


class VllmWorker(Worker):
    def _start(self, arguments: dict[str, Any]) -> asyncio.AbstractEventLoop:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        return loop

    def _abort(self, number: str) -> None:
        self._running = asyncio.ensure_future(self._engine.abort(number))

    async def _generate(self, message: dict[str, Any]) -> Any:
        """What the answer says of the hand-off, which proxies pass on."""
        from vllm import SamplingParams

        prompt = {"prompt_token_ids": message["ids"]}
        sampling = SamplingParams(
            max_tokens=message["n"],
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": message["extra"]} if message["extra"] else None,
        )
        number, answered = str(message["id"]), None
        replica = message.get("dp")  # as a router's header X-data-parallel-rank says
        async for output in self._engine.generate(prompt, sampling, number, data_parallel_rank=replica):
            (only,) = output.outputs
            if only.finish_reason in ("error", "abort"):
                raise RuntimeError(f"finish_reason {only.finish_reason}")
            cached = output.num_cached_tokens
            answered = output.kv_transfer_params or answered
            self._say(id=message["id"], t=time.monotonic(), tokens=list(only.token_ids), cached=cached)
        return answered

    async def _samples(self, message: dict[str, Any]) -> Any:
        """The most likely tokens, which vLLM's greedy sampling gives to one sample alone; and what the answer says."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            n=message["samples"],
            max_tokens=message["n"],
            temperature=1.0,
            top_k=1,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": message["extra"]},
        )
        prompt = {"prompt_token_ids": message["ids"]}
        async for output in self._engine.generate(prompt, sampling, str(message["id"])):
            answered = output.kv_transfer_params
        return {"tokens": [list(each.token_ids) for each in output.outputs], "answered": answered}

    async def _counted(self, message: dict[str, Any]) -> int:
        """A counter, with all labels that it has beside those that are named."""
        from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

        counters = [each for each in get_metrics_snapshot() if isinstance(each, Counter)]
        wanted = message["labels"].items()
        return sum(each.value for each in counters if each.name == message["name"] and wanted <= each.labels.items())

    async def _used(self, message: dict[str, Any]) -> int:
        return 0

    async def _flush(self, message: dict[str, Any]) -> bool:
        """Empties the prefix cache; false while any block is in use."""
        return bool(await self._engine.reset_prefix_cache(reset_connector=message["host"]))


if __name__ == "__main__":
    main(VllmWorker)
