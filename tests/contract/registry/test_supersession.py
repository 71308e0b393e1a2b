"""A rank whose place was taken says so once, where an operator reads it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvgrpc.server import RegistryServer
from tests.support.rank_host import RankHost
from tests.support.waiting import wait_until


@pytest.fixture
def registry() -> Iterator[RegistryServer]:
    server = RegistryServer(["127.0.0.1:0"]).open()
    yield server
    server.close()


def test_a_rank_that_was_replaced_writes_one_line_with_both_incarnations_and_is_not_healthy(
    registry: RegistryServer, caplog: pytest.LogCaptureFixture
) -> None:
    first = RankHost("S", "PREFILL", {"registry": registry.address})
    second = RankHost("S", "PREFILL", {"registry": registry.address})
    try:
        wait_until(lambda: first.rank.registration_state == "superseded" and not first.rank.healthy, 30)
        assert second.rank.healthy
    finally:
        second.close(1.0)
        first.close(1.0)
    (line,) = [record for record in caplog.records if "was replaced by" in record.getMessage()]
    assert line.levelno == logging.ERROR
    assert str(first.rank.ref) in line.getMessage() and str(second.rank.ref.epoch) in line.getMessage()
