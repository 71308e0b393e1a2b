"""The options of channels and servers fit together, and the library knows every one of them."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from kvgrpc.rpc.options import CHANNEL_OPTIONS, OWN_CONNECTION, SELDOM, SERVER_OPTIONS, SESSION, Options, server_name

SERVER, CHANNEL = dict(SERVER_OPTIONS), dict(CHANNEL_OPTIONS)
SHORTEST_PING = int(SERVER["grpc.http2.min_ping_interval_without_data_ms"])


def test_a_client_never_pings_more_often_than_a_server_allows() -> None:
    assert int(CHANNEL["grpc.keepalive_time_ms"]) >= 2 * SHORTEST_PING
    assert CHANNEL["grpc.http2.max_pings_without_data"] == 0
    assert CHANNEL["grpc.keepalive_permit_without_calls"] == SERVER["grpc.keepalive_permit_without_calls"] == 1


def test_a_server_allows_what_clients_of_other_languages_usually_do() -> None:
    assert SHORTEST_PING <= 10_000


def test_both_sides_take_messages_of_the_same_size() -> None:
    for name in ("grpc.max_receive_message_length", "grpc.max_send_message_length"):
        assert CHANNEL[name] == SERVER[name] == 16 * 1024 * 1024


def test_two_servers_never_share_a_port() -> None:
    assert SERVER["grpc.so_reuseport"] == 0


def test_proxies_of_the_environment_are_not_asked() -> None:
    assert CHANNEL["grpc.enable_http_proxy"] == 0


def test_a_channel_that_waits_comes_back_within_seconds() -> None:
    assert int(CHANNEL["grpc.initial_reconnect_backoff_ms"]) <= 200
    assert int(CHANNEL["grpc.max_reconnect_backoff_ms"]) <= 5_000


@pytest.mark.parametrize(
    "options", [SERVER_OPTIONS, CHANNEL_OPTIONS, OWN_CONNECTION, SESSION, SELDOM, server_name("engine-7")]
)
def test_the_library_knows_each_option(options: Options) -> None:
    """It ignores what it does not know, and a misspelt option would be without effect for ever."""
    (library,) = (Path(grpc.__file__).parent / "_cython").glob("cygrpc*.so")
    known = library.read_bytes()
    assert [name for name, _ in options if name.encode() not in known] == []
    assert len(dict(options)) == len(options)
