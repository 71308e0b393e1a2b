"""Our transfers as vLLM logs and exports them: "KV Transfer metrics" of its log, ``vllm:kvgrpc_…`` of /metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class TransferStats(KVConnectorStats):
    """Of one interval, in ``data``, of plain values: "seconds" of each hand-off that succeeded, at prefill from its
    last page to the end, at decode from its pages to the end; "bytes" in all; "failed" by reason; "unused" by reason:
    requests of decode that do not use what prefill computed for them.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {"seconds": [], "bytes": 0, "failed": {}, "unused": {}}

    def succeeded(self, seconds: float, nbytes: int) -> None:
        self.data["seconds"].append(seconds)
        self.data["bytes"] += nbytes

    def failed(self, reason: str) -> None:
        self.data["failed"][reason] = self.data["failed"].get(reason, 0) + 1

    def left(self, reason: str) -> None:
        self.data["unused"][reason] = self.data["unused"].get(reason, 0) + 1

    def take(self) -> TransferStats | None:
        """Returns what was counted since the last call; None if nothing was."""
        if self.is_empty():
            return None
        taken = TransferStats(self.data)
        self.reset()
        return taken

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        self.data["seconds"] += other.data["seconds"]
        self.data["bytes"] += other.data["bytes"]
        for kind in ("failed", "unused"):
            for reason, count in other.data[kind].items():
                self.data[kind][reason] = self.data[kind].get(reason, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds = sorted(self.data["seconds"])
        succeeded = {
            "hand-offs": len(seconds),
            "MB": round(self.data["bytes"] / 2**20, 3),
            "median ms": round(seconds[len(seconds) // 2] * 1e3, 3) if seconds else 0.0,
            "longest ms": round(seconds[-1] * 1e3, 3) if seconds else 0.0,
        }
        told = {
            f"{said} {reason}": count
            for said, kind in (("failed", "failed"), ("prefill unused", "unused"))
            for reason, count in self.data[kind].items()
        }
        return {**succeeded, **told}

    def is_empty(self) -> bool:
        return not self.data["seconds"] and not self.data["failed"] and not self.data["unused"]


class TransferMetrics(KVConnectorPromMetrics):
    """The figures of hand-offs for Prometheus, in vLLM's API server."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        seconds = self._histogram_cls(
            name="vllm:kvgrpc_handoff_seconds",
            documentation="Duration of hand-offs of KV caches that succeeded.",
            buckets=_SECONDS,
            labelnames=labelnames,
        )
        nbytes = self._counter_cls(
            name="vllm:kvgrpc_handoff_bytes",
            documentation="Bytes of KV caches that were handed over.",
            labelnames=labelnames,
        )
        self._seconds = create_metric_per_engine(seconds, per_engine)
        self._bytes = create_metric_per_engine(nbytes, per_engine)
        self._failed = self._counter_cls(
            name="vllm:kvgrpc_handoffs_failed",
            documentation="Hand-offs of KV caches that failed, by reason (docs/errors.md of kvgrpc).",
            labelnames=[*labelnames, "reason"],
        )
        self._unused = self._counter_cls(
            name="vllm:kvgrpc_prefills_unused",
            documentation="Requests of decode that do not use what prefill computed for them, by reason.",
            labelnames=[*labelnames, "reason"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for seconds in transfer_stats_data["seconds"]:
            self._seconds[engine_idx].observe(seconds)
        self._bytes[engine_idx].inc(transfer_stats_data["bytes"])
        for reason, count in transfer_stats_data["failed"].items():
            self._failed.labels(*self.per_engine_labelvalues[engine_idx], reason).inc(count)
        for reason, count in transfer_stats_data["unused"].items():
            self._unused.labels(*self.per_engine_labelvalues[engine_idx], reason).inc(count)
