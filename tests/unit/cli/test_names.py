"""Values of messages as tables show them."""

from __future__ import annotations

import pytest

from kvgrpc.cli import names
from kvgrpc.cli.cache import prefetch
from kvgrpc.cli.events import index
from kvgrpc.cli.events.index import STATES
from kvgrpc.cli.output import gigabytes
from kvgrpc.cli.rooms import command as rooms
from kvgrpc.v1 import common_pb2, index_service_pb2, prefetch_service_pb2, transfer_service_pb2

NEWER = 99


def test_a_value_is_shown_without_the_name_of_its_kind() -> None:
    assert rooms.state_name(transfer_service_pb2.ROOM_STATE_WAITING_FOR_INPUT) == "WAITING_FOR_INPUT"
    assert rooms.session_state_name(transfer_service_pb2.SESSION_STATE_OPEN) == "OPEN"
    assert rooms.writes_name(transfer_service_pb2.WRITES_SETTLED) == "SETTLED"
    assert names.role_name(common_pb2.ROLE_PREFILL) == "prefill"
    assert names.tier_name(prefetch_service_pb2.CacheTierUse(tier=common_pb2.TIER_HOST)) == "host"


def test_a_value_that_only_a_newer_server_knows_is_shown_by_its_number() -> None:
    """One such cell must not hide the table."""
    operation = prefetch_service_pb2.CacheOperation()
    message = operation.FromString(
        b"".join(
            bytes((operation.DESCRIPTOR.fields_by_name[name].number << 3, NEWER)) for name in ("kind", "state", "stop")
        )
    )
    assert prefetch.kind_name(message) == f"operation_kind {NEWER}"
    assert prefetch.state_name(message) == f"OPERATION_STATE {NEWER}"
    assert prefetch.stop_name(message) == f"OPERATION_STOP {NEWER}"
    newer: list[tuple[object, str]] = [
        (rooms.state_name, "ROOM_STATE"),
        (rooms.session_state_name, "SESSION_STATE"),
        (rooms.writes_name, "WRITES"),
        (names.role_name, "role"),
    ]
    for name, kind in newer:
        assert callable(name) and name(NEWER) == f"{kind} {NEWER}"
    freshness = index_service_pb2.Freshness.FromString(
        bytes((index_service_pb2.Freshness.DESCRIPTOR.fields_by_name["state"].number << 3, NEWER))
    )
    assert index._fresh(freshness)[0] == f"index_source_state {NEWER}"


def test_a_reason_of_a_newer_server_is_shown_by_its_number() -> None:
    number = common_pb2.Failure.DESCRIPTOR.fields_by_name["reason"].number
    failure = common_pb2.Failure.FromString(bytes((number << 3, NEWER)))
    assert names.reason_name(failure) == f"ERROR_REASON {NEWER}"


def test_every_state_of_a_source_can_be_asked_for() -> None:
    known = {f"INDEX_SOURCE_STATE_{state.upper()}" for state in STATES}
    assert known == {*index_service_pb2.IndexSourceState.keys()} - {"INDEX_SOURCE_STATE_UNSPECIFIED"}


def test_a_rank_is_short_without_what_all_ranks_of_its_engine_share() -> None:
    layout = common_pb2.Layout(dp=1, pp=1, cp=1, tp=4)
    assert names.short_rank("P/dp0/pp0/cp0/tp3", layout) == "P/tp3"
    assert names.short_rank("P/dp0/pp0/cp0/tp3 +2", layout) == "P/tp3 +2"
    assert names.short_rank("P/dp0/pp0/cp0/tp0", common_pb2.Layout(dp=1, pp=1, cp=1, tp=1)) == "P"
    assert names.short_rank("P/tp3", layout) == "P/tp3"


@pytest.mark.parametrize(
    ("rate", "shown"), [(12.346, "12.35"), (0.03, "0.03"), (0.006, "0.01"), (0.001_23, "<.01"), (0.0, "0.00")]
)
def test_a_small_rate_is_no_standstill(rate: float, shown: str) -> None:
    assert gigabytes(rate) == shown
