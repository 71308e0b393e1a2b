"""What operators scrape: one page of our own, from a port that is opened on request only."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import prometheus_client

# Each registers what it collects.
from kvgrpc.observability import caches, hand_offs, metrics, ranks, staging, storage

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_every_name_is_ours_and_explained() -> None:
    families = list(metrics.REGISTRY.collect())
    assert families
    for family in families:
        assert family.name.startswith("kvgrpc_")
        assert family.documentation.endswith(".")


def test_the_page_of_metrics_has_each_of_them_once_and_no_other() -> None:
    assert caches and hand_offs and ranks and staging and storage
    families = metrics.REGISTRY.collect()
    there = {f"{each.name}_total" if each.type == "counter" else each.name for each in families}
    names = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `kvgrpc_")]
    said = [name for cell in names for name in re.findall(r"`(kvgrpc_\w+)`", cell)]
    assert len(said) == len(set(said))
    # What prometheus_client itself tells of a process is one cell, kvgrpc_process_ with an ellipsis.
    assert {name for name in there if not name.startswith("kvgrpc_process_")} == set(said)


def test_the_registry_of_the_host_stays_as_it_was() -> None:
    assert not [family.name for family in prometheus_client.REGISTRY.collect() if family.name.startswith("kvgrpc_")]


def test_a_host_may_add_our_page_to_its_own() -> None:
    host = prometheus_client.CollectorRegistry()
    host.register(metrics.REGISTRY)
    assert "kvgrpc_rpc_calls" in {family.name for family in host.collect()}


def test_importing_kvgrpc_configures_no_logging() -> None:
    assert logging.getLogger("kvgrpc").handlers == []
    assert logging.getLogger("kvgrpc").level == logging.NOTSET
