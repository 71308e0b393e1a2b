"""What operators scrape: one page of our own, from a port that is opened on request only."""

from __future__ import annotations

import logging
import threading
import urllib.request

import prometheus_client
import pytest

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


def test_the_page_is_served_on_loopback_when_asked_for() -> None:
    metrics.EVENT_BATCHES.inc()
    port = metrics.serve(0)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        text = page.read().decode()
    assert "kvgrpc_event_batches_total" in text
    threads = [thread for thread in threading.enumerate() if thread.name == "kvgrpc-metrics"]
    assert threads and all(thread.daemon for thread in threads)


def test_a_taken_port_is_an_os_error() -> None:
    with pytest.raises(OSError):
        metrics.serve(metrics.serve(0))


def test_importing_kvgrpc_configures_no_logging() -> None:
    assert logging.getLogger("kvgrpc").handlers == []
    assert logging.getLogger("kvgrpc").level == logging.NOTSET
