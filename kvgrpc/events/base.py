"""The engine's side of event publishing: one call that never blocks and never raises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from kvgrpc.events.log.stream import EventStream

SHUTDOWN_SECONDS = 1.0


class EventPublisher(ABC):
    """Publishes the KV-cache events of one data-parallel rank. Base of own publishers too (``register_publisher``)."""

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self.data_parallel_rank = data_parallel_rank

    @property
    def stream(self) -> EventStream | None:
        """The stream that ListStreams and Watch serve; None where nothing is kept."""
        return None

    @property
    def healthy(self) -> bool:
        """False when events are no longer published although nobody shut it down."""
        return True

    @abstractmethod
    def publish(self, batch: object) -> bool:
        """Takes a batch, which belongs to the publisher from then on. Neither blocks nor raises; False: it is lost."""

    def publish_raw(self, payload: bytes | bytearray | memoryview) -> bool:
        """Takes a batch that is encoded already, of a buffer a copy. Neither blocks nor raises; False: it is lost."""
        return False

    def fence(self) -> None:
        """A newer incarnation took this rank's place: nothing more is sent, not even what waits. Does not block."""
        self.shutdown(0.0)

    def describe_local_source(self, block_size: int) -> dict[str, Any] | None:
        """The endpoint of live events, as SGLang asks its publishers; None: nowhere."""
        return None

    def get_publisher_config(self) -> None:
        """Answers vLLM, which asks for its own table of sources, with nothing: ListStreams has it."""
        return None

    @abstractmethod
    def shutdown(self, deadline: float = SHUTDOWN_SECONDS) -> None:
        """Sends what was published and ends, within ``deadline`` seconds; harmless when repeated."""


class NullEventPublisher(EventPublisher):
    """For ranks that have nothing to say: takes everything, keeps nothing, opens nothing."""

    def publish(self, batch: object) -> bool:
        return True

    def publish_raw(self, payload: bytes | bytearray | memoryview) -> bool:
        return True

    def shutdown(self, deadline: float = SHUTDOWN_SECONDS) -> None:
        """Nothing to do."""
