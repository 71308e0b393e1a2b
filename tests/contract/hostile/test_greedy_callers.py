"""One caller that opens whatever it may: past its bound it is told so, and all others get in (rule 15,
hostile frames)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvgrpc.errors import Reason, TooManyRequests
from kvgrpc.rpc.interceptors import ALLOWED, CallLimits
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.rpc.status import error_from
from kvgrpc.server import KVPoll, KVReceiver
from kvgrpc.v1 import event_service_pb2, index_service_pb2, prefetch_service_pb2, server_service_pb2
from kvgrpc.v1 import registry_service_pb2 as registry_pb
from kvgrpc.v1 import transfer_service_pb2 as pb
from tests.support.hostile.greedy_caller import Caller
from tests.support.hostile.honest_pair import TIMING
from tests.support.rank_host import RankHost
from tests.support.secrets import proof, tokens_of
from tests.support.waiting import wait_until

LIMITS = {
    "/kvgrpc.v1.EventService/Watch": 3,
    "/kvgrpc.v1.RegistryService/WatchEngines": 3,
    "/grpc.health.v1.Health/Watch": 4,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": 5,
    "/kvgrpc.v1.TransferService/LocateRooms": 6,
    "/kvgrpc.v1.RegistryService/KeepAlive": 7,
}


@pytest.fixture(scope="module")
def asked() -> Iterator[RankHost]:
    """A rank with a registry and events, whose callers are told apart by their tokens."""
    settings = {
        "registry": "embedded",
        "events": {"publisher": "null"},
        "server_security": ServerSecurity(tokens=tokens_of("rank P:own\nrank a-*:greedy\nrank b-*:honest")),
        "client_security": proof("own"),
        "call_limits": CallLimits(
            watches_per_caller=3,
            health_watches_per_caller=4,
            reflections_per_caller=5,
            locates_per_caller=6,
            keepalives_per_caller=7,
        ),
    }
    host = RankHost("P", "PREFILL", {"timing": TIMING, **settings})
    yield host
    host.close(1.0)


@pytest.mark.parametrize("path", LIMITS)
def test_one_caller_locks_nobody_else_out(asked: RankHost, path: str) -> None:
    with contextlib.ExitStack() as stack:
        greedy, honest = Caller(asked, "greedy", "rank a-*"), Caller(asked, "honest", "rank b-*")
        stack.callback(greedy.close)
        stack.callback(honest.close)
        limit = LIMITS[path]
        held = [greedy.hold(path) for _ in range(limit)]
        refused = greedy.refusal(path)
        assert isinstance(refused, TooManyRequests) and refused.retry_after
        assert (refused.metadata["limit"], refused.metadata["value"]) == (str(limit), str(limit + 1))
        assert refused.metadata["scope"].endswith("of one caller") and "rank a-*" in refused.message
        assert "_per_caller (KVGRPC_CALL_LIMITS)" in refused.message
        for _ in range(limit):
            honest.hold(path)
        held[0].cancel()
        wait_until(lambda: greedy.open_calls(path) == limit - 1)
        greedy.hold(path)


def test_rooms_that_one_caller_seeks_leave_as_many_to_others(asked: RankHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """One LocateRooms names 4,096: a few calls, far below their own bound, were all that a rank looks for."""
    path = "/kvgrpc.v1.TransferService/LocateRooms"
    sought = cast(Any, asked.rank.transfer)._sought
    wait_until(lambda: sought.count == 0)
    monkeypatch.setattr(sought._shares, "_limit", 8)
    with contextlib.ExitStack() as stack:
        greedy, honest = Caller(asked, "greedy", "rank a-*"), Caller(asked, "honest", "rank b-*")
        stack.callback(greedy.close)
        stack.callback(honest.close)
        for _ in range(4):
            greedy.hold(path)
        refused = greedy.refusal(path)
        assert isinstance(refused, TooManyRequests) and refused.retry_after
        assert refused.metadata == {"limit": "4", "value": "5", "scope": "rooms sought of one caller"}
        assert "rank a-*" in refused.message
        honest.call(path)
        wait_until(lambda: sought.count == 5)


def test_sessions_of_one_caller_leave_as_many_streams_to_others(
    asked: RankHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session ends the older one of its pair, and whoever invents ranks has as many pairs as it likes."""
    path = "/kvgrpc.v1.TransferService/Session"
    shares = cast(Any, asked.rank)._parts.listener._admission._shares
    wait_until(lambda: not shares.of_caller("rank a-*") + shares.of_caller("rank b-*"))
    monkeypatch.setattr(shares, "_limit", 20)
    with contextlib.ExitStack() as stack:
        greedy = Caller(asked, "greedy", "rank a-*")
        stack.callback(greedy.close)
        held = 0
        while not (call := greedy.call(path)).done():
            wait_until(lambda: shares.of_caller("rank a-*") > held or call.done())  # noqa: B023
            held = shares.of_caller("rank a-*")
        refused = error_from(call.exception())
        assert isinstance(refused, TooManyRequests) and refused.retry_after and 0 < held <= 10
        assert (refused.metadata["scope"], refused.metadata["value"]) == ("streams of one caller", str(held + 1))
        assert "rank a-*" in refused.message and "call_limits.streams (KVGRPC_CALL_LIMITS)" in refused.message
        for name, token in (("a-decode", "greedy"), ("b-decode", "honest")):
            trusted = {"client_security": proof(token), "bootstrap_allow": ("127.0.0.1",)}
            decode = RankHost(name, "DECODE", {"timing": TIMING, **trusted})
            stack.callback(decode.close, 1.0)
            receiver = KVReceiver(cast(Any, decode.rank.transfer), asked.rank.address, 77)
            wait_until(lambda: receiver.poll() is not KVPoll.Bootstrapping)  # noqa: B023
            if token == "honest":
                assert receiver.poll() is KVPoll.WaitingForInput
                continue
            assert receiver.failure is not None and receiver.failure.reason is Reason.TOO_MANY_REQUESTS
            assert receiver.failure.retry_after and "call_limits.streams" in receiver.failure.message


def test_whatever_stays_open_has_a_bound_for_one_caller() -> None:
    files = (event_service_pb2, index_service_pb2, prefetch_service_pb2, registry_pb, server_service_pb2, pb)
    streams = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.server_streaming
    }
    # One for a pair, one for a member: the newer ends the older; in all, as many as their caller leaves to others.
    of_ranks = {"/kvgrpc.v1.TransferService/Session", "/kvgrpc.v1.PrefetchService/JoinAgreement"}
    limits = CallLimits()
    bounded = {path for path in ALLOWED if limits.per_caller(path) is not None}
    assert of_ranks < streams
    assert bounded == streams - of_ranks | {"/kvgrpc.v1.TransferService/LocateRooms"}
    for path in LIMITS:
        assert limits.per_caller(path) is not None
