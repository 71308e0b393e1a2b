"""A READY engine that lacks a dp rank's event stream: the registry says so where an operator looks."""

from __future__ import annotations

import logging
import time
import urllib.request
from typing import Any

import pytest

from kvgrpc.cli.main import main
from kvgrpc.client import SyncClient
from kvgrpc.model import Layout
from kvgrpc.server import RegistryServer
from tests.support.rank_host import RankHost


def rank(registry: RegistryServer, dp: int, *, events: bool) -> RankHost:
    config: dict[str, Any] = {"registry": registry.address, "layout": Layout(dp=2), "dp": dp, "lease_ttl": 1.0}
    return RankHost("P", "PREFILL", config | ({"events": {"publisher": "null"}} if events else {}))


def until_lacking(client: SyncClient, lacking: list[int]) -> None:
    end = time.monotonic() + 20
    while True:
        engine = client.get_engine("P")
        if engine.ready and list(engine.dp_lacking_events) == lacking:
            return
        assert time.monotonic() < end, engine
        time.sleep(0.01)


def test_it_is_in_the_row_in_the_table_in_the_log_and_in_the_metrics(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "kvgrpc.registry")
    registry = RegistryServer(["127.0.0.1:0"], metrics_listen="127.0.0.1:0").open()

    def missing() -> str:
        page: str = urllib.request.urlopen(f"http://{registry.metrics_address}/metrics", timeout=10).read().decode()
        return next(line for line in page.splitlines() if line.startswith("kvgrpc_registry_streams_missing"))

    first, second = rank(registry, 0, events=True), rank(registry, 1, events=False)
    try:
        with SyncClient(registry.address) as client:
            until_lacking(client, [1])
            assert [row.serves_events for row in client.get_engine("P").rows] == [True, False]
            assert missing() == "kvgrpc_registry_streams_missing 1.0"
            with pytest.raises(SystemExit) as ended:
                main(["engines", "-s", registry.address])
            shown = capsys.readouterr()
            assert not ended.value.code and "READY" in shown.out
            assert "P: dp 1 publishes no events, though others do: is its configuration theirs?" in shown.err
            second.close(2.0)
            second = rank(registry, 1, events=True)
            until_lacking(client, [])
            assert missing() == "kvgrpc_registry_streams_missing 0.0"
    finally:
        first.close(2.0)
        second.close(2.0)
        registry.close()
    said = [record.getMessage() for record in caplog.records if record.name == "kvgrpc.registry.streams"]
    assert said == [
        "P is READY, but its dp 1 publishes no events though others of it do: no router knows what it caches",
        "P: every dp rank has its stream of events now",
    ]
