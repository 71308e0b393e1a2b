"""vLLM's offloading on CPUs, which writes twice a second what of its engine's host memory is held for transfers.

For ``benchmarks.pulled_p2p``: chunks that vLLM's own manager will not evict, whichever tier holds them, and staging
pages of kvgrpc's pulls, lent and taken. ``HELD_FILE`` names the file.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from kvgrpc.observability.metrics import REGISTRY
from tests.engines.vllm_offloading_on_cpu import TieringOnCpu

HELD_FILE = "KVGRPC_BENCH_HELD_FILE"
_SECONDS = 0.5


class CountedOnCpu(TieringOnCpu):
    def get_manager(self) -> Any:
        begins = self._manager is None
        manager: Any = super().get_manager()
        if begins and HELD_FILE in os.environ:
            file = Path(os.environ[HELD_FILE])
            threading.Thread(target=_report, args=(manager.primary_tier, file), daemon=True).start()
        return manager


def _report(host: Any, file: Path) -> None:
    while True:
        chunks = host._num_allocated_chunks - len(host._free_list) - host._num_evictable_cache_chunks
        staged = [REGISTRY.get_sample_value("kvgrpc_pull_pages", {"direction": way}) or 0 for way in ("lent", "taken")]
        whole = file.with_suffix(".new")
        whole.write_text(f"{chunks} {int(sum(staged))}")
        whole.replace(file)
        time.sleep(_SECONDS)
