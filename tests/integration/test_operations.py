"""What an operator sees of a registry, a prefill and a decode, each a process of its own, in good and in bad hours."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvgrpc.client import SyncClient
from tests.support.rank_host import LAYERS, PAGE_BYTES, RankProcess
from tests.support.waiting import wait_until

FAILED, TRANSFERRING, SUCCESS = 0, 3, 4
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
SECONDS = 30.0


class Operator:
    """Asks one process as Prometheus and a kubelet do, and reads its log."""

    def __init__(self, name: str, metrics_address: str, log: Path) -> None:
        self.name, self.metrics_address, self.log = name, metrics_address, log

    def ask(self, path: str) -> int:
        try:
            with OPENER.open(f"http://{self.metrics_address}{path}", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refusal:
            return int(refusal.code)

    def metric(self, name: str, **labels: str) -> float:
        with OPENER.open(f"http://{self.metrics_address}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def reads(self, *words: str) -> int:
        """How many lines of the log have all these words."""
        return sum(all(word in line for word in words) for line in self.log.read_text().splitlines())


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[tuple[str, Operator]]:
    """Its gRPC address, and what it shows."""
    log = tmp_path / "registry.log"
    command = [sys.executable, "-m", "kvgrpc", "serve", "registry", "--listen", "127.0.0.1:0"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, "--metrics-listen", "127.0.0.1:0", "--lease-ttl", "2"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    metrics, address = (process.stdout.readline().split()[-1] for _ in range(2))
    yield address, Operator("registry", metrics, log)
    process.terminate()
    assert process.wait(SECONDS) == 0
    process.stdout.close()


@pytest.fixture
def start(tmp_path: Path, registry: tuple[str, Operator]) -> Iterator[Callable[..., tuple[RankProcess, Operator]]]:
    ranks: list[RankProcess] = []

    def one(engine: str, role: str) -> tuple[RankProcess, Operator]:
        address = registry[0] if role == "PREFILL" else None
        rank = RankProcess(engine, role, metrics_listen="127.0.0.1:0", **({"registry": address} if address else {}))
        ranks.append(rank)
        rank.opened().call("log_to", str(tmp_path / f"{engine}.log"))
        return rank, Operator(engine, rank.call("metrics_address"), tmp_path / f"{engine}.log")

    yield one
    for rank in ranks:
        rank.end()


def test_an_operator_sees_what_goes_well_what_fails_and_who_died(
    registry: tuple[str, Operator], start: Callable[..., tuple[RankProcess, Operator]]
) -> None:
    bootstrap, watched = registry
    prefill, at_prefill = start("P", "PREFILL")
    decode, at_decode = start("D", "DECODE")
    prefill.call("fill", 1)

    for each in (watched, at_prefill, at_decode):
        assert (each.ask("/livez"), each.ask("/readyz")) == (200, 200), each.name
    wait_until(lambda: watched.metric("kvgrpc_registry_rows") == 1)

    decode.call("receive", 1, bootstrap, [1, 2, 3], wait_first=True)
    prefill.call("send", 1, [4, 5, 6])
    decode.call("wait", "receivers", [1], [SUCCESS])
    prefill.call("wait", "senders", [1], [SUCCESS])
    for each in (at_prefill, at_decode):
        wait_until(lambda each=each: each.metric("kvgrpc_rooms_ended_total", outcome="success") == 1)  # type: ignore[misc]
        wait_until(lambda each=each: each.metric("kvgrpc_hand_off_bytes_total") == 3 * LAYERS * PAGE_BYTES)  # type: ignore[misc]
        assert each.metric("kvgrpc_hand_off_seconds_count") == 1
        assert each.metric("kvgrpc_sessions", state="open") == 1

    decode.call("receive", 2, bootstrap, [7], wait_first=True)
    with SyncClient(decode.address) as client:
        client.cancel_room(2, cause="stuck")
    failed = {"outcome": "failed", "reason": "ROOM_CANCELLED"}
    wait_until(lambda: at_decode.metric("kvgrpc_rooms_ended_total", **failed) == 1)
    wait_until(lambda: at_decode.reads("room 2 failed at decode", "ROOM_CANCELLED") == 1)
    assert at_decode.reads("room 2", "cancelled by 127.0.0.1:") == 1

    decode.call("receive", 3, bootstrap, [8, 9, 10], wait_first=True)
    prefill.call("send", 3, [1, 2], last=False)
    prefill.call("wait", "senders", [3], [TRANSFERRING])
    assert at_decode.metric("kvgrpc_rooms_open") == 1
    prefill.stop()  # first: what a hung peer may still write stays held, and is shown
    decode.call("wait", "receivers", [3], [FAILED])
    wait_until(lambda: at_decode.metric("kvgrpc_pages_held") == 3)
    prefill.kill()
    decode.call("wait_release", [3])
    wait_until(lambda: at_decode.metric("kvgrpc_rooms_ended_total", outcome="failed", reason="PEER_LOST") == 1)
    wait_until(lambda: at_decode.reads("lost its pair with P/") == 1)
    wait_until(lambda: at_decode.metric("kvgrpc_pages_held") == 0)
    assert at_decode.reads("room 3 failed at decode", "PEER_LOST") == 1
    assert (at_decode.ask("/livez"), at_decode.ask("/readyz")) == (200, 200), "a dead peer is nobody else's illness"
    wait_until(lambda: watched.metric("kvgrpc_registry_rows") == 0)  # its lease has run out

    with SyncClient(decode.address) as client:
        client.drain(0.1)
    assert (at_decode.ask("/livez"), at_decode.ask("/readyz")) == (200, 503), "a drain must not restart a pod"
    assert at_decode.reads("drained: nothing is left") == 1
