"""The clock runs while at least one write does, and bytes count once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvgrpc.dataplane.base import Outcome, Result
from kvgrpc.demo.processes.measured_plane import MeasuredPlane
from tests.support.faults.dataplane import NullDataPlane

NO_WRITES = np.zeros(0, dtype=np.uint64)


class Write:
    """Ends when told."""

    result: Result | None = None

    def poll(self) -> Result | None:
        return self.result

    def stop(self) -> None:
        self.result = Result(Outcome.REJECTED)


def test_overlapping_writes_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 15.0, 20.0, 21.0])
    monkeypatch.setattr("kvgrpc.demo.processes.measured_plane.time", SimpleNamespace(monotonic=lambda: next(clock)))
    inner = NullDataPlane()
    writes = [Write(), Write(), Write()]
    monkeypatch.setattr(inner, "submit", lambda *_: writes.pop(0))
    first_write, second_write, third_write = writes
    plane = MeasuredPlane(inner)
    first, second = (plane.submit(None, NO_WRITES, NO_WRITES, NO_WRITES) for _ in range(2))
    assert first.poll() is None
    first_write.result = second_write.result = Result(Outcome.DONE, nbytes=100)
    for _ in range(3):
        first.poll()
        second.poll()
    assert (plane.written_bytes, plane.writing_seconds) == (200, 5.0)
    third = plane.submit(None, NO_WRITES, NO_WRITES, NO_WRITES)
    third.stop()
    assert third.poll() == third_write.result
    assert (plane.written_bytes, plane.writing_seconds) == (200, 6.0)
