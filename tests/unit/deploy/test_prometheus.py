"""What deploy/ tells Prometheus and Grafana: rules that fire when they should, over metrics that are there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

# Each registers what it collects.
from kvgrpc.observability import hand_offs, metrics, ranks, staging, storage

PROMETHEUS = Path(__file__).parents[3] / "deploy" / "prometheus"
DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "kvgrpc.json"
SERIES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
OURS = re.compile(r"\bkvgrpc_\w+")


def rules(file: str) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((PROMETHEUS / file).read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """(panel, query) of the dashboard, with the variables as Grafana fills them."""
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], filled(target["expr"])
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["name"], filled(annotation["expr"])


def filled(query: str) -> str:
    return query.replace("$__rate_interval", "1m").replace("$job", ".+").replace("$instance", ".+")


def exported() -> set[str]:
    assert hand_offs and ranks and staging and storage
    families = metrics.REGISTRY.collect()
    return {family.name + ending for family in families for ending in SERIES[family.type]}


def asked() -> dict[str, set[str]]:
    """The metrics that each rule, panel and variable names."""
    named: dict[str, set[str]] = {}
    for rule in rules("alerts.yml") + rules("recording.yml"):
        named[rule.get("alert") or rule["record"]] = set(OURS.findall(rule["expr"]))
    for panel, query in queries():
        named.setdefault(panel, set()).update(OURS.findall(query))
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        named[f"variable {variable['name']}"] = set(OURS.findall(str(variable["query"])))
    return named


def test_every_metric_that_is_asked_for_is_exported() -> None:
    names = asked()
    assert len(set().union(*names.values())) > 25
    there = exported()
    assert {where: lacking for where, metric in names.items() if (lacking := metric - there)} == {}


def test_every_series_that_the_rules_are_tested_with_is_exported() -> None:
    series = set(OURS.findall((PROMETHEUS / "alerts.test.yml").read_text()))
    assert series and series <= exported()


def test_every_alert_and_recording_rule_has_a_test() -> None:
    wrong, at_work = yaml.safe_load((PROMETHEUS / "alerts.test.yml").read_text())["tests"]
    fired = {test["alertname"] for test in wrong["alert_rule_test"] if test["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules("alerts.yml")}
    tried = " ".join(test["expr"] for test in at_work["promql_expr_test"] if test["exp_samples"])
    assert [rule["record"] for rule in rules("recording.yml") if rule["record"] not in tried] == []
    # What fires in the first is there in the second, or its silence would say nothing; no failure is no series.
    inputs = [
        {OURS.findall(each["series"])[0] for each in test["input_series"] if "kvgrpc_" in each["series"]}
        for test in (wrong, at_work)
    ]
    assert inputs[0] - inputs[1] == {"kvgrpc_task_failures_total"}


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["id"] for panel in panels}) == len(panels)


def promtool(*arguments: str) -> str:
    command = shutil.which("promtool")
    if command is None:
        pytest.skip("no promtool: Debian's package prometheus has it")
    done = subprocess.run([command, *arguments], capture_output=True, text=True, cwd=PROMETHEUS, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_loads_its_configuration_and_the_rules() -> None:
    loaded = promtool("check", "config", "prometheus.yml")
    for file in ("alerts.yml", "recording.yml"):
        assert re.search(rf"Checking {file}\n\s+SUCCESS: {len(rules(file))} rules found", loaded), loaded


def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    promtool("test", "rules", "alerts.test.yml")


def test_every_query_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    """As recording rules, which promtool parses."""
    asked = [{"record": f"panel:query:{number}", "expr": query} for number, (_, query) in enumerate(queries())]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": asked}]}))
    assert f"{len(asked)} rules found" in promtool("check", "rules", str(file))
