"""Every metric of kvgrpc: its name, its labels and what it counts. The only module that imports prometheus.

They live in ``REGISTRY``, not in prometheus' global one, so that the page of an engine that embeds kvgrpc stays as it
is; it may add ours with ``prometheus_client.REGISTRY.register(kvgrpc.observability.metrics.REGISTRY)``. All calls are
thread-safe and cost about a microsecond; on a hot path keep the child that ``labels()`` returns, and count per frame.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib import metadata

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import Metric

from kvgrpc import __version__


class _Registry(CollectorRegistry):
    """Without the time at which each series began: twice as many series, which nobody asks for."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


REGISTRY = _Registry(auto_describe=True)

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# An index answers in less than the shortest of these.
_CALL_SECONDS = (0.0001, 0.00025, *SECONDS)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(name, text, labels, registry=REGISTRY)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(name, text, labels, registry=REGISTRY)


def _histogram(name: str, text: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
    return Histogram(name, text, labels, registry=REGISTRY, buckets=buckets)


# Calls that this process serves. method: "/kvgrpc.v1.RegistryService/Register"; code: "OK", "NOT_FOUND", ...
RPC_CALLS = _counter("kvgrpc_rpc_calls", "Calls that ended, streams included.", "method", "code")
RPC_SECONDS = _histogram("kvgrpc_rpc_seconds", "How long unary calls took.", "method", buckets=_CALL_SECONDS)
RPC_IN_FLIGHT = _gauge("kvgrpc_rpc_in_flight", "Calls that run now.", "method")
# reason: the name of the ErrorReason without its prefix.
ERRORS = _counter("kvgrpc_errors", "Statuses that were sent as errors.", "reason")

# Connections to the port in front of the registry of a vLLM prefill.
BOOTSTRAP_REFUSED = _counter(
    "kvgrpc_bootstrap_connections_refused", "Connections beyond what vLLM's bootstrap port takes."
)

# The process.
TASK_FAILURES = _counter("kvgrpc_task_failures", "Background tasks that ended by an unexpected exception.", "task")
LOOP_LAG_SECONDS = _gauge("kvgrpc_loop_lag_seconds", "How late the event loop last woke.")
LOOP_LATE_SECONDS = _histogram("kvgrpc_loop_late_seconds", "How late the event loop woke, each time that it was to.")
CERTIFICATE_END = _gauge("kvgrpc_certificate_end_seconds", "When the server's certificate ends, in Unix time.", "file")
_gauge("kvgrpc_build_info", "Always 1; the versions are labels.", "version", "python", "grpcio").labels(
    __version__, platform.python_version(), metadata.version("grpcio")
).set(1)
ProcessCollector(namespace="kvgrpc", registry=REGISTRY)

# Hand-offs. Those that ended: hand_offs.py; what is open now: ranks.py.
# outcome: the name of a kvgrpc.dataplane.base.Outcome.
DATA_PLANE_BYTES = _counter("kvgrpc_data_plane_bytes", "Bytes of submissions that are in place.", "data_plane")
DATA_PLANE_DESCRIPTORS = _counter(
    "kvgrpc_data_plane_descriptors", "Contiguous pieces that submissions were made of.", "data_plane"
)
DATA_PLANE_SUBMISSIONS = _counter("kvgrpc_data_plane_submissions", "Submissions that ended.", "data_plane", "outcome")

# Events.
EVENT_BATCHES = _counter("kvgrpc_event_batches", "Batches that were published.")
EVENT_BYTES = _counter("kvgrpc_event_bytes", "Bytes of those batches.")
# cause: as in DroppedRange.cause.
EVENTS_DROPPED = _counter("kvgrpc_event_batches_dropped", "Batches that could not be published.", "cause")
EVENTS_UNKNOWN = _counter("kvgrpc_events_unknown", "Events in those batches of a kind that is not known.")
EVENT_WATCH_READERS = _gauge("kvgrpc_event_watch_readers", "Streams of Watch.")
EVENT_WATCH_LAG = _gauge("kvgrpc_event_watch_lag_batches", "Batches that the slowest of them was not sent yet.")
EVENTS_UNHEARD = _gauge("kvgrpc_events_unheard", "Publishers that connect to an address at which nobody listens.")
JOURNAL_BYTES = _gauge("kvgrpc_event_journal_bytes", "Bytes that the journals keep.")

# An index. state: of IndexSourceState without its prefix.
INDEX_SOURCES = _gauge("kvgrpc_index_sources", "Caches that an index follows, by how they are known.", "state")
INDEX_LACKING = _gauge("kvgrpc_index_not_followed", "Engines and addresses that an index cannot follow.")
INDEX_LAG = _gauge("kvgrpc_index_lag_batches", "Batches that are known to be missing, of all caches.")
INDEX_BLOCKS = _gauge("kvgrpc_index_blocks", "Different blocks that an index knows: about 100 bytes each.")
INDEX_PROMPTS = _counter("kvgrpc_index_prompts", "Prompts that were scored.")
INDEX_MISSES = _counter("kvgrpc_index_prompt_misses", "Prompts of which no cache held the first block.")

# The hierarchical cache. kind, state, stop: names of kvgrpc.prefetch.model.
CACHE_OPERATIONS = _counter("kvgrpc_cache_operations", "Prefetches and backups that ended.", "kind", "state", "stop")

# Calls of a store. call: "read", "write", or "ask", which is all else; end: "ok", "failed", "timeout", "down".
STORAGE_CALLS = _counter("kvgrpc_storage_calls", "Calls of storage backends that ended.", "call", "end")

# Pulls that ended. direction: "taken", "lent"; end: "OK", or the name of the ErrorReason.
PULLS = _counter("kvgrpc_pulls", "Rooms between host caches that ended.", "direction", "end")
PULLED_BYTES = _counter("kvgrpc_pulled_bytes", "Bytes of pages that came over them.", "direction")
# Of engines that say how quickly they compute, by the leading rank of each cache.
PULL_SAVED = _counter("kvgrpc_pull_saved_seconds", "Seconds that computing pages would have taken which were taken.")
PULL_SPENT = _counter("kvgrpc_pull_spent_seconds", "Seconds that taking pages took, of those that brought none too.")

# The registry.
REGISTRY_ROWS = _gauge("kvgrpc_registry_rows", "Rows that are registered, each with a lease that runs.")
REGISTRY_WATCH_READERS = _gauge("kvgrpc_registry_watch_readers", "Streams of WatchEngines.")
REGISTRY_STREAMS_MISSING = _gauge(
    "kvgrpc_registry_streams_missing", "dp ranks of READY engines that lack the event stream which others of it have."
)
REGISTRY_EXPIRED = _counter("kvgrpc_registry_leases_expired", "Leases that ran out.")
