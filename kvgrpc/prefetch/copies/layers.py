"""Tells a forward pass which layers of a load are in place, one signal for each load."""

from __future__ import annotations

import threading
import time

from kvgrpc.errors import CopyFailed, KvGrpcError
from kvgrpc.prefetch.copies.streams import Mark


class LayerSignal:
    """One merged load: layers 0 to ``layers`` - 1 come in place in order, or it fails. Thread-safe.

    Each load has one of its own, so that no forward pass waits on another's, however many are in flight.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._marks: list[Mark] = []
        self._error: KvGrpcError | None = None
        self._changed = threading.Condition()

    @property
    def ready(self) -> int:
        """Layers that were queued so far; on a CPU they are in place."""
        return len(self._marks)

    @property
    def failed(self) -> KvGrpcError | None:
        return self._error

    def wait(self, layer: int, timeout: float) -> None:
        """Before the forward pass reads ``layer``: waits until its copy is queued, and orders the current CUDA stream
        behind it (on a CPU: until it is in place).

        Raises CopyFailed when the load failed, or the layer did not come within ``timeout`` seconds: then the request's
        pages are not to be used.
        """
        end = time.monotonic() + timeout
        with self._changed:
            while len(self._marks) <= layer and self._error is None:
                left = end - time.monotonic()
                if not left > 0:  # NaN seconds are over, too
                    raise CopyFailed(
                        f"layer {layer} did not come within {timeout:g} s; {len(self._marks)} of {self.layers} did",
                        metadata={"direction": "load", "layer": layer},
                    )
                self._changed.wait(left)
            if len(self._marks) <= layer:
                assert self._error is not None
                raise self._error
            mark = self._marks[layer]
        mark.wait_on_stream()

    def done(self, mark: Mark) -> None:
        """The next layer was copied; for the copying thread."""
        with self._changed:
            self._marks.append(mark)
            self._changed.notify_all()

    def fail(self, error: KvGrpcError) -> None:
        """No further layer comes; for the copying thread."""
        with self._changed:
            if len(self._marks) < self.layers and self._error is None:
                self._error = error
            self._changed.notify_all()
