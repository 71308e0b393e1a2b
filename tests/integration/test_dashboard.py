"""The dashboard's queries in a real Prometheus that scrapes a registry, an index, a prefill and a decode rank."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvgrpc.server import IndexServer, RegistryServer
from tests.support.ports import free_port
from tests.support.rank_host import RankHost
from tests.support.waiting import wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
PANELS = json.loads((DEPLOY / "grafana/kvgrpc.json").read_text())["panels"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
# What a fleet at work shows; the others are of faults, of caches and of pulls.
AT_WORK = (
    *("Hand-offs a second", "Time of a hand-off", "Where the time goes", "Bytes a second", "Rooms that are open"),
    *("Sessions by state", "Registrations by state", "Loop lag", "Calls a second"),
)
ROOMS = itertools.count(1)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, once it has scraped a fleet between whose ranks there were hand-offs, often enough for rates."""
    command = shutil.which("prometheus")
    if command is None:
        pytest.skip("no prometheus: Debian's package of that name")
    registry = RegistryServer(["127.0.0.1:0"], metrics_listen="127.0.0.1:0").open()
    index = IndexServer(["127.0.0.1:0"], registry=registry.address).open()
    prefill = RankHost("P", "PREFILL", {"registry": registry.address})
    decode = RankHost("D", "DECODE", {"registry": registry.address})
    try:
        with running(command, tmp_path_factory.mktemp("prometheus"), registry.metrics_address) as address:
            hand_over(decode, prefill, f"{registry.address}/P")
            wait_until(lambda: ask(address, "kvgrpc_rooms_ended_total"))
            hand_over(decode, prefill, f"{registry.address}/P")
            wait_until(lambda: ask(address, "rate(kvgrpc_hand_off_seconds_count[1m]) > 0"))
            yield address
    finally:
        decode.close(2.0)
        prefill.close(2.0)
        index.close()
        registry.close()


@contextmanager
def running(command: str, folder: Path, scraped: str) -> Iterator[str]:
    """Prometheus with the rules of deploy/, which looks each second."""
    port = free_port()
    for file in ("alerts.yml", "recording.yml"):
        shutil.copy(DEPLOY / "prometheus" / file, folder)
    jobs = [{"job_name": "kvgrpc", "static_configs": [{"targets": [scraped]}]}]
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings = {"global": every, "rule_files": ["alerts.yml", "recording.yml"], "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    files = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    words = [command, *files, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: answers(f"127.0.0.1:{port}"))
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(address: str, query: str) -> list[dict[str, Any]]:
    """The series; a query that Prometheus refuses is an error of HTTP."""
    words = urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(f"http://{address}/api/v1/query?{words}", timeout=30) as answer:
        found = json.load(answer)
    assert found["status"] == "success", found
    result: list[dict[str, Any]] = found["data"]["result"]
    return result


def filled(query: str) -> str:
    """With the variables as Grafana fills them."""
    return query.replace("$__rate_interval", "1m").replace("$job", ".+").replace("$instance", ".+")


def hand_over(decode: RankHost, prefill: RankHost, address: str) -> None:
    room = next(ROOMS)
    decode.receive(room, address, range(8))
    prefill.send(room, range(8))
    decode.wait("receivers", [room], [4])


def test_prometheus_answers_every_query_and_panels_of_a_fleet_at_work_have_series(prometheus: str) -> None:
    found = [(title, ask(prometheus, filled(query))) for title, query in QUERIES]
    assert len(found) > 25
    assert {title for title in AT_WORK} <= {title for title, series in found if series}


def test_the_rules_are_evaluated_without_an_error_and_no_alert_fires_of_a_fleet_at_work(prometheus: str) -> None:
    with urllib.request.urlopen(f"http://{prometheus}/api/v1/rules", timeout=30) as answer:
        groups = json.load(answer)["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 20 and [rule["name"] for rule in rules if rule["health"] == "err"] == []
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []
