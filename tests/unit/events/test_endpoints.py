"""Where a data-parallel rank publishes."""

from __future__ import annotations

import pytest

from kvgrpc.events.endpoints import Endpoint, check_reached, endpoint_of


@pytest.mark.parametrize(
    ("endpoint", "dp", "address"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://10.0.0.1:5557", 1, "tcp://10.0.0.1:5558"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://:::5557", 1, "tcp://[::]:5558"),
        ("tcp://inproc-tcp-ipc.example:5557", 1, "tcp://inproc-tcp-ipc.example:5558"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("tcp://*:*", 3, "tcp://*:*"),
        ("ipc:///tmp/tcp-events", 0, "ipc:///tmp/tcp-events"),
        ("ipc:///tmp/tcp-events", 2, "ipc:///tmp/tcp-events_dp2"),
        ("ipc://*", 2, "ipc://*"),
        ("inproc://cache", 1, "inproc://cache_dp1"),
    ],
)
def test_each_rank_has_its_own(endpoint: str, dp: int, address: str) -> None:
    assert endpoint_of(endpoint, dp).address == address


@pytest.mark.parametrize(
    ("endpoint", "bind"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://:::5557", True),
        ("tcp://127.0.0.1:0", True),
        ("ipc:///tmp/x", True),
        ("inproc://x", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://[::1]:5557", False),
        ("tcp://proxy:5557", False),
    ],
)
def test_wildcards_and_local_names_bind_and_addresses_connect(endpoint: str, bind: bool) -> None:
    assert endpoint_of(endpoint, 0).bind is bind


def test_the_configuration_may_say_otherwise() -> None:
    assert endpoint_of("tcp://127.0.0.1:5557", 0, bind=True) == Endpoint("tcp://127.0.0.1:5557", True)
    assert endpoint_of("ipc:///tmp/x", 0, bind=False) == Endpoint("ipc:///tmp/x", False)


def test_ipv6_is_seen() -> None:
    assert endpoint_of("tcp://[fe80::1]:5557", 0).ipv6
    assert not endpoint_of("tcp://*:5557", 0).ipv6


@pytest.mark.parametrize(
    ("endpoint", "dp", "bind"),
    [
        ("", 0, None),
        ("5557", 0, None),
        ("udp://*:5557", 0, None),
        ("tcp://", 0, None),
        ("tcp://host", 0, None),
        ("tcp://:5557", 0, None),
        ("tcp://host:port", 0, None),
        ("tcp://*:65535", 1, None),
        ("tcp://*:5557", 0, False),
        ("tcp://127.0.0.1:0", 0, False),
    ],
)
def test_nonsense_is_refused_by_name(endpoint: str, dp: int, bind: bool | None) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        endpoint_of(endpoint, dp, bind)


@pytest.mark.parametrize("host", ["ü", "a b", "-a", "a/b", "a\n"])
def test_a_host_that_zmq_refuses_to_connect_to_is_refused_before(host: str) -> None:
    with pytest.raises(ValueError, match="host"):
        check_reached(f"tcp://{host}:5557")


@pytest.mark.parametrize("host", ["10.0.0.1", "[::1]", "[fe80::1%eth0]", "engine_0.svc-a", "127.0.0.1:0;10.0.0.1"])
def test_what_zmq_connects_to_is_taken(host: str) -> None:
    assert check_reached(f"tcp://{host}:5557").address.endswith(":5557")
