"""The answers of an index that is asked for its sources."""

from __future__ import annotations

from kvgrpc.v1 import index_service_pb2


class Sources(list[index_service_pb2.IndexSource]):
    """A list of caches that an index follows. ``counts``: how many of all are in which state, those that the question
    left out too; ``not_followed``: what it cannot follow, and why."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[index_service_pb2.IndexSourceState.ValueType, int] = {}
        self.not_followed: list[str] = []
