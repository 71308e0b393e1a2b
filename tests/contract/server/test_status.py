"""What a kubelet, Prometheus and whoever reads the log see of a rank and of a registry."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvgrpc.dataplane
from kvgrpc.client import SyncClient
from kvgrpc.errors import AddressNotAllowed
from kvgrpc.model import Pool, PoolKind, Region, Role
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.server import IndexServer, Rank, RankConfig, RegistryServer, open_rank
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender
from kvgrpc.v1.server_service_pb2 import REGISTRATION_STATE_RETRYING, RegistrationState
from tests.support.waiting import wait_until

PAGES, PAGE_BYTES = 64, 4096
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_one(engine: str, role: Role, **settings: Any) -> Rank[Any]:
    plane = kvgrpc.dataplane.open_plane("shm")
    address = plane.allocate(PAGES * PAGE_BYTES)
    pool = Pool("kv", PoolKind.KV, 16, PAGES, "float32", (Region(0, "kv", address, PAGE_BYTES, PAGE_BYTES),))
    return open_rank(
        RankConfig(engine=engine, role=role, pools=(pool,), data_plane=plane, metrics_listen="127.0.0.1:0", **settings)
    )


def ask(address: str, path: str) -> tuple[int, str]:
    try:
        with OPENER.open(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


def metric(rank: Rank[Any], name: str, **labels: str) -> float:
    page = ask(rank.metrics_address, "/metrics")[1]
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@pytest.fixture
def ranks() -> Iterator[tuple[Rank[Any], Rank[Any]]]:
    prefill, decode = open_one("P", Role.PREFILL, registry="embedded"), open_one("D", Role.DECODE)
    yield prefill, decode
    decode.close(2.0), prefill.close(2.0)


def hand_off(prefill: Rank[Any], decode: Rank[Any], room: int) -> KVReceiver:
    receiver = KVReceiver(decode.transfer, prefill.address, room)
    sender = KVSender(prefill.transfer, prefill.address, room)
    wait_until(lambda: receiver.poll() is KVPoll.WaitingForInput)
    receiver.init(np.array([3, 4, 5], np.int32))
    sender.init(3)
    sender.send(np.array([10, 20, 30], np.int32))
    wait_until(lambda: receiver.ended and sender.ended)
    return receiver


def test_a_rank_counts_its_hand_offs(ranks: tuple[Rank[Any], Rank[Any]]) -> None:
    prefill, decode = ranks
    names = {
        "kvgrpc_rooms_ended_total": {"outcome": "success"},
        "kvgrpc_hand_off_seconds_count": {},
        "kvgrpc_hand_off_bytes_total": {},
    }

    def values(role: str) -> list[float]:
        return [metric(decode, name, role=role, **labels) for name, labels in names.items()]

    before = values("prefill"), values("decode")
    assert hand_off(prefill, decode, 7).poll() is KVPoll.Success
    for then, role in zip(before, ("prefill", "decode"), strict=True):
        after = [then[0] + 1, then[1] + 1, then[2] + 3 * PAGE_BYTES]
        wait_until(lambda role=role, after=after: values(role) == after)  # type: ignore[misc]
    assert metric(prefill, "kvgrpc_sessions", role="prefill") >= 1
    assert metric(decode, "kvgrpc_sessions", role="decode", state="open") == 1
    assert metric(decode, "kvgrpc_pages_held_limit", role="decode") == PAGES // 4
    wait_until(lambda: metric(decode, "kvgrpc_rooms_open") == 0)


def test_a_failed_room_is_counted_by_its_reason_and_writes_one_line(
    ranks: tuple[Rank[Any], Rank[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = ranks
    labels = {"role": "decode", "outcome": "failed", "reason": "ROOM_CANCELLED"}
    before = metric(decode, "kvgrpc_rooms_ended_total", **labels)
    with caplog.at_level(logging.INFO, "kvgrpc"):
        receiver = KVReceiver(decode.transfer, prefill.address, 8)
        wait_until(lambda: receiver.poll() is KVPoll.WaitingForInput)
        with SyncClient(decode.address) as client:
            client.cancel_room(8, cause="stuck\x1b[2J")
        wait_until(lambda: metric(decode, "kvgrpc_rooms_ended_total", **labels) == before + 1)
        wait_until(lambda: len(said_of_room_8(caplog)) >= 2)
    lines = said_of_room_8(caplog)
    assert len(lines) == 2, lines
    assert "cancelled by 127.0.0.1:" in lines[0]
    assert "room 8 failed at decode after" in lines[1] and "ROOM_CANCELLED" in lines[1] and "\x1b" not in lines[1]


def said_of_room_8(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if "room 8" in line and "at prefill" not in line]


def test_a_lost_pair_writes_one_line(caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = open_one("P", Role.PREFILL, registry="embedded"), open_one("D", Role.DECODE)
    hand_off(prefill, decode, 9)
    with caplog.at_level(logging.INFO, "kvgrpc"):
        decode.close(2.0)
        wait_until(lambda: said_of_the_pair(caplog))
        prefill.close(2.0)
    assert said_of_the_pair(caplog) == 1


def test_a_rank_whose_registry_is_away_says_so_on_its_page_and_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvgrpc.registry.client.registration")
    registry = RegistryServer(["127.0.0.1:0"], lease_ttl=1.5).open()
    rank = open_one("M", Role.PREFILL, registry=registry.address)

    def registrations() -> dict[str, float]:
        """Those of other tests' ranks are at none."""
        states = [name.removeprefix("REGISTRATION_STATE_").lower() for name in RegistrationState.keys()[1:]]
        return {state: metric(rank, "kvgrpc_registrations", role="prefill", state=state) for state in states}

    nobody = dict.fromkeys(registrations(), 0.0)
    try:
        assert registrations() == nobody | {"registered": 1.0}
        registry.close()
        wait_until(lambda: registrations() == nobody | {"retrying": 1.0})
        with SyncClient(rank.address) as client:
            told = client.get_server_info().registration
        assert told.state == REGISTRATION_STATE_RETRYING and told.HasField("away_since") and told.last_error
        registry = RegistryServer([registry.address], lease_ttl=1.5).open()
        wait_until(lambda: registrations() == nobody | {"registered": 1.0})
    finally:
        rank.close(2.0)
        registry.close()
    (away,) = [message for message in caplog.messages if message.startswith(f"registering at {registry.address} again")]
    (back,) = [message for message in caplog.messages if message.startswith(f"registered at {registry.address} again")]
    assert caplog.messages.index(away) < caplog.messages.index(back) and back.endswith(" s")


def said_of_the_pair(caplog: pytest.LogCaptureFixture) -> int:
    return sum("lost its pair with D/" in record.getMessage() for record in list(caplog.records))


def test_a_drain_takes_readiness_away_and_leaves_the_process_alive(
    ranks: tuple[Rank[Any], Rank[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    rank = ranks[0]
    assert ask(rank.metrics_address, "/livez") == (200, "[+] loop\n[+] transfer\n[+] events\n")
    assert ask(rank.metrics_address, "/readyz")[0] == 200
    with caplog.at_level(logging.INFO, "kvgrpc"), SyncClient(rank.address) as client, ThreadPoolExecutor(1) as other:
        other.submit(client.drain, 0.1).result(30)
    assert ask(rank.metrics_address, "/readyz")[0] == 503
    assert ask(rank.metrics_address, "/livez")[0] == 200
    said = [record.getMessage() for record in list(caplog.records)]
    assert any("drains: 0 rooms are open" in line for line in said)
    assert any("drained: nothing is left" in line for line in said)


def test_a_closed_rank_is_gone_from_the_page_and_its_port_free(ranks: tuple[Rank[Any], Rank[Any]]) -> None:
    prefill, decode = ranks
    address = decode.metrics_address
    decode.close(2.0)
    assert metric(prefill, "kvgrpc_pages_held_limit", role="decode") == 0
    with pytest.raises(OSError):
        ask(address, "/livez")


def test_a_registry_answers_the_same_questions() -> None:
    registry = RegistryServer(["127.0.0.1:0"], metrics_listen="127.0.0.1:0").open()
    assert ask(registry.metrics_address, "/livez") == (200, "[+] loop\n[+] registry\n")
    assert ask(registry.metrics_address, "/readyz")[0] == 200
    assert "kvgrpc_registry_rows" in ask(registry.metrics_address, "/metrics")[1]
    registry.close()
    with pytest.raises(OSError):
        ask(registry.metrics_address, "/livez")


@pytest.mark.parametrize("kind", [RegistryServer, functools.partial(IndexServer, sources=["127.0.0.1:1"])])
def test_a_start_that_failed_for_its_metrics_port_leaves_nothing_open(kind: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = kind(["127.0.0.1:0"], metrics_listen=f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(AddressNotAllowed, match="metrics_listen"):
            server.open()
    host, port = server.address.split(":")
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), 5.0)
    server.close()


def test_an_index_that_did_not_start_follows_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = IndexServer([f"127.0.0.1:{other.getsockname()[1]}"], sources=["127.0.0.1:1"])
        before = indexes()
        with pytest.raises(AddressNotAllowed, match="cannot listen"):
            server.open()
    assert indexes() == before
    server.close()


def indexes() -> int:
    async def count() -> int:
        return sum(task.get_name() == "prefix-index" for task in asyncio.all_tasks())

    return LoopThread.shared().run(count(), 5.0)
