"""What operators scrape: one page of our own, from a port that is opened on request only."""

from __future__ import annotations

import logging

import prometheus_client

from kvgrpc.observability import metrics


def test_every_name_is_ours_and_explained() -> None:
    families = list(metrics.REGISTRY.collect())
    assert families
    for family in families:
        assert family.name.startswith("kvgrpc_")
        assert family.documentation.endswith(".")


def test_the_registry_of_the_host_stays_as_it_was() -> None:
    assert not [family.name for family in prometheus_client.REGISTRY.collect() if family.name.startswith("kvgrpc_")]


def test_a_host_may_add_our_page_to_its_own() -> None:
    host = prometheus_client.CollectorRegistry()
    host.register(metrics.REGISTRY)
    assert "kvgrpc_rpc_calls" in {family.name for family in host.collect()}


def test_importing_kvgrpc_configures_no_logging() -> None:
    assert logging.getLogger("kvgrpc").handlers == []
    assert logging.getLogger("kvgrpc").level == logging.NOTSET
