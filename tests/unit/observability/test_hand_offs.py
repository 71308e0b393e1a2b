"""What operators see of hand-offs: counts by outcome and reason, how long they took, one line for a failure."""

from __future__ import annotations

import logging
import time

import pytest

from kvgrpc.errors import Failure, Reason
from kvgrpc.observability.hand_offs import STAGES, HandOff, HandOffs
from kvgrpc.observability.metrics import REGISTRY

logger = logging.getLogger("kvgrpc.tests.hand_offs")


def ended(
    room: int = 7,
    stages: tuple[float, float, float] = (0.0, 0.0, 0.0),
    *,
    began: float = 1000.0,
    nbytes: int = 4096,
    attempt: int = 0,
    peers: tuple[str, ...] = ("P",),
    failure: Failure | None = None,
) -> HandOff:
    bootstrap, wait, transfer = stages
    ready, moving = began + bootstrap, began + bootstrap + wait
    return HandOff(room, attempt, peers, began, ready, moving, moving + transfer, 8, nbytes, "", failure)


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_ends_are_counted_by_outcome_and_reason() -> None:
    hand_offs = HandOffs("decode", logger)
    labels = {"role": "decode", "outcome": "failed", "reason": "PEER_LOST"}
    before = value("kvgrpc_rooms_ended_total", **labels)
    hand_offs.failed(ended(failure=Failure(Reason.PEER_LOST, "gone")))
    assert value("kvgrpc_rooms_ended_total", **labels) == before + 1


def test_a_reason_that_only_a_newer_version_knows_makes_no_new_label() -> None:
    labels = {"role": "prefill", "outcome": "failed", "reason": "UNSPECIFIED"}
    before = value("kvgrpc_rooms_ended_total", **labels)
    HandOffs("prefill", logger).failed(ended(failure=Failure(4711, "new")))  # type: ignore[arg-type]
    assert value("kvgrpc_rooms_ended_total", **labels) == before + 1


def test_durations_fall_into_the_bucket_that_holds_them() -> None:
    names = {"role": "prefill"}
    before = [value("kvgrpc_hand_off_seconds_bucket", le=le, **names) for le in ("0.01", "0.025", "+Inf")]
    hand_offs = HandOffs("prefill", logger)
    hand_offs.succeeded(ended(stages=(0.0, 0.0, 0.02)))
    hand_offs.sort_in()
    after = [value("kvgrpc_hand_off_seconds_bucket", le=le, **names) for le in ("0.01", "0.025", "+Inf")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [0, 1, 1]


def test_each_stage_has_its_own_histogram() -> None:
    def counts() -> list[float]:
        return [
            value("kvgrpc_hand_off_stage_seconds_bucket", role="decode", stage=stage, le="0.025") for stage in STAGES
        ]

    before = counts()
    hand_offs = HandOffs("decode", logger)
    hand_offs.succeeded(ended(stages=(0.02, 0.03, 0.01)))
    hand_offs.sort_in()
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 0, 1, 0]
    HandOffs("decode", logger).notified(0.001, 5)
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 0, 1, 5]


@pytest.mark.parametrize(
    ("ready", "moving", "stages"),
    [
        pytest.param(11.0, 13.0, (1.0, 2.0, 3.0), id="in order"),
        pytest.param(11.0, 10.5, (1.0, 0.0, 5.0), id="pages were given before the sessions stood"),
        pytest.param(0.0, 0.0, (0.0, 0.0, 6.0), id="said at once, and no page moved"),
    ],
)
def test_stages_follow_each_other_whatever_came_first(
    ready: float, moving: float, stages: tuple[float, float, float]
) -> None:
    assert HandOff(7, 0, ["P"], 10.0, ready, moving, 16.0, 8, 4096, "", None).stages() == stages


def test_the_last_256_that_went_well_stay_and_a_room_that_is_used_again_counts_once() -> None:
    hand_offs = HandOffs("decode", logger)
    for room in [*range(1, 301), 300]:
        hand_offs.succeeded(ended(room, (0.0, 0.0, 1e-3 * room)))
    assert list(hand_offs.last_succeeded()) == [(room, 0) for room in range(45, 301)]


def test_the_last_that_went_well_are_sorted_once_however_often_somebody_asks() -> None:
    hand_offs = HandOffs("decode", logger)
    hand_offs.succeeded(ended(1, (0.0, 0.0, 1e-3)))
    known = hand_offs.last_succeeded()
    assert hand_offs.last_succeeded() is known
    hand_offs.succeeded(ended(2, (0.0, 0.0, 1e-3)))
    assert list(hand_offs.last_succeeded()) == [(1, 0), (2, 0)] and list(known) == [(1, 0)]


def test_a_pair_knows_its_rooms_bytes_speed_and_quantiles() -> None:
    hand_offs, now = HandOffs("decode", logger), time.monotonic()
    for room in range(1, 101):
        hand_offs.succeeded(ended(room, (0.0, 0.001 * room, 0.5), began=now - 1.0, nbytes=10**9))
    hand_offs.failed(ended(101, began=now, failure=Failure(Reason.PEER_LOST, "gone")))
    for sums in (hand_offs.of_pair("P").since_start, hand_offs.of_pair("P").last_minute()):
        assert (sums.succeeded, sums.failed, sums.nbytes) == (100, 1, 100 * 10**9)
        assert sums.bytes_per_second == pytest.approx(2e9)
        assert sums.quantile(0.5) == pytest.approx(0.55, rel=0.05)
        assert sums.quantile(0.99) == pytest.approx(0.599, rel=0.05)


def test_the_last_minute_forgets_what_the_start_remembers() -> None:
    hand_offs, now = HandOffs("decode", logger), time.monotonic()
    hand_offs.succeeded(ended(1, (0.0, 0.0, 0.5), began=now - 71.0))
    hand_offs.succeeded(ended(2, (0.0, 0.0, 0.5), began=now - 1.0))
    assert hand_offs.of_pair("P").since_start.succeeded == 2
    assert hand_offs.of_pair("P").last_minute().succeeded == 1


def test_a_room_of_two_parts_counts_at_each_pair_with_half_of_its_bytes() -> None:
    hand_offs = HandOffs("decode", logger)
    hand_offs.succeeded(ended(1, nbytes=4096, peers=("P0", "P1")))
    assert [hand_offs.of_pair(peer).since_start.nbytes for peer in ("P0", "P1", "P2")] == [2048, 2048, 0]


def test_a_failed_room_writes_one_line_that_says_all(caplog: pytest.LogCaptureFixture) -> None:
    failure = Failure(Reason.TRANSFER_FAILED, "the cable\nis \x1b[31mcut", origin="P/dp0/pp0/cp0/tp0@5")
    HandOffs("decode", logger).failed(ended(8123, (0.0, 0.0, 0.25), attempt=2, failure=failure))
    (record,) = caplog.records
    assert record.getMessage() == (
        "room 8123 attempt 2 failed at decode after 0.250 s: TRANSFER_FAILED: "
        "the cable\\nis \\x1b[31mcut (seen first by P/dp0/pp0/cp0/tp0@5)"
    )
