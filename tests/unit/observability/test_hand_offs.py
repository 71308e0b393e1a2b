"""What operators see of hand-offs: counts by outcome and reason, how long they took, one line for a failure."""

from __future__ import annotations

import logging

import pytest

from kvgrpc.errors import Failure, Reason
from kvgrpc.observability.hand_offs import STAGES, HandOffs
from kvgrpc.observability.metrics import REGISTRY
from kvgrpc.transfer.runtime.stages import TimedHandle

logger = logging.getLogger("kvgrpc.tests.hand_offs")


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_ends_are_counted_by_outcome_and_reason() -> None:
    hand_offs = HandOffs("decode", logger)
    labels = {"role": "decode", "outcome": "failed", "reason": "PEER_LOST"}
    before = value("kvgrpc_rooms_ended_total", **labels)
    hand_offs.failed(7, 0, Failure(Reason.PEER_LOST, "gone"), 1.5)
    assert value("kvgrpc_rooms_ended_total", **labels) == before + 1


def test_a_reason_that_only_a_newer_version_knows_makes_no_new_label() -> None:
    labels = {"role": "prefill", "outcome": "failed", "reason": "UNSPECIFIED"}
    before = value("kvgrpc_rooms_ended_total", **labels)
    HandOffs("prefill", logger).failed(7, 0, Failure(4711, "new"), None)  # type: ignore[arg-type]
    assert value("kvgrpc_rooms_ended_total", **labels) == before + 1


def test_durations_fall_into_the_bucket_that_holds_them() -> None:
    names = {"role": "prefill"}
    before = [value("kvgrpc_hand_off_seconds_bucket", le=le, **names) for le in ("0.01", "0.025", "+Inf")]
    HandOffs("prefill", logger).succeeded(0.02, 4096)
    after = [value("kvgrpc_hand_off_seconds_bucket", le=le, **names) for le in ("0.01", "0.025", "+Inf")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [0, 1, 1]


def test_each_stage_has_its_own_histogram() -> None:
    def counts() -> list[float]:
        return [
            value("kvgrpc_hand_off_stage_seconds_bucket", role="decode", stage=stage, le="0.025") for stage in STAGES
        ]

    before = counts()
    HandOffs("decode", logger).succeeded(0.06, 4096, (0.02, 0.03, 0.01))
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 0, 1, 0]
    HandOffs("decode", logger).notified(0.001, 5)
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 0, 1, 5]


def test_stages_follow_each_other_whatever_came_first() -> None:
    handle = TimedHandle()
    handle.began, handle.ready_at, handle.moving_at = 10.0, 11.0, 13.0
    assert handle.stages(16.0) == (1.0, 2.0, 3.0)
    handle.moving_at = 10.5  # the pages were given before the sessions stood
    assert handle.stages(16.0) == (1.0, 0.0, 5.0)
    handle.ready_at = handle.moving_at = 0.0  # said at once, and no page moved
    assert handle.stages(16.0) == (0.0, 0.0, 6.0)


def test_a_failed_room_writes_one_line_that_says_all(caplog: pytest.LogCaptureFixture) -> None:
    failure = Failure(Reason.TRANSFER_FAILED, "the cable\nis \x1b[31mcut", origin="P/dp0/pp0/cp0/tp0@5")
    HandOffs("decode", logger).failed(8123, 2, failure, 0.25)
    (record,) = caplog.records
    assert record.getMessage() == (
        "room 8123 attempt 2 failed at decode after 0.250 s: TRANSFER_FAILED: "
        "the cable\\nis \\x1b[31mcut (seen first by P/dp0/pp0/cp0/tp0@5)"
    )
