"""The engine core that a tier belongs to: waking it, and looking at what its device holds.

vLLM tells a tier neither. An idle core waits for its input queue, where WAKEUP is vLLM's own word for: look whether
there is work. The tier is made while the core is, so the core is found among the callers of its constructor.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, get_offload_group_idx

logger = logging.getLogger("vllm." + __name__)
T = TypeVar("T")


class EngineCore:
    """``core`` None: there is none to wake, because whoever made the engine steps it himself."""

    def __init__(self, core: Any) -> None:
        self._core = core

    @classmethod
    def of_caller(cls) -> EngineCore:
        """The one whose constructor runs now."""
        frame = sys._getframe(1)
        while frame is not None:
            found = frame.f_locals.get("self")
            if hasattr(found, "input_queue") and hasattr(found, "process_input_queue_block"):
                return cls(found)
            frame = frame.f_back  # type: ignore[assignment]
        logger.warning("kvgrpc: this engine core cannot be woken: orders wait for its next step")
        return cls(None)

    @property
    def can_be_woken(self) -> bool:
        return self._core is not None

    def wake(self) -> None:
        """On any thread: an idle core looks whether there is work."""
        if self._core is not None:
            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    @property
    def config(self) -> Any:
        """vLLM's; None where no core was found."""
        return getattr(self._core, "vllm_config", None)

    def of_workers(self, look: Callable[[Any], T]) -> list[T]:
        """Calls ``look`` in each worker's own process, which imports it. For whoever is made with the core, while no
        worker computes."""
        executor = getattr(self._core, "model_executor", None)
        return [] if executor is None else list(executor.collective_rpc(look))

    def request(self, number: str) -> Any:
        """One that the scheduler has; None where it has none of this number. On the scheduler's thread."""
        return getattr(getattr(self._core, "scheduler", None), "requests", {}).get(number)

    def leading_on_device(self, keys: Sequence[OffloadKey]) -> int:
        """Single reads of a table that the core's thread changes; what they find may be gone at once."""
        pool = self._pool()
        if pool is None:
            return 0
        for number, key in enumerate(keys):
            if pool.get_cached_block(get_offload_block_hash(key), [get_offload_group_idx(key)]) is None:
                return number
        return len(keys)

    def present_on_device(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Returns which of them it has, by reads as those of ``leading_on_device``."""
        return [self.leading_on_device([key]) == 1 for key in keys]

    def device_blocks(self) -> tuple[int, int]:
        """All blocks, and those that are not free to be given away at once; the null block, which no request gets, is
        none of them."""
        pool = self._pool()
        if pool is None:
            return 0, 0
        blocks = pool.num_gpu_blocks - 1
        return blocks, blocks - pool.get_num_free_blocks()

    def _pool(self) -> Any:
        scheduler = getattr(self._core, "scheduler", None)
        return getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
