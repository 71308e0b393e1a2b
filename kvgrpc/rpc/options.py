"""Every option of our channels and servers, each with its reason. Keepalive pairs stand together (a test compares)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvgrpc import __version__

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
# What the services of a server need, if it does not say otherwise: a frame of a session, a node's rows.
LARGEST_REQUEST_BYTES = 4 * 1024 * 1024 + 64 * 1024

# A client that pings more often than its server allows is sent away with ENHANCE_YOUR_CALM (llm-d-kv-cache#359).
# Of one connection. Past it a client waits until one of its calls has ended: a decode may wait for a thousand rooms.
MAX_CALLS_OF_A_CONNECTION = 2_048
# A connection without a call. Clients dial again when they need one, without telling anybody.
IDLE_MILLISECONDS = 120_000

PING_MILLISECONDS = 30_000
PING_TIMEOUT_MILLISECONDS = 10_000
SERVER_SHORTEST_PING_MILLISECONDS = 10_000
# Of a rank, whose sessions ping quicker: the library once a second at most, which is ten times what it bears.
RANK_SHORTEST_PING_MILLISECONDS = 100

# Parsing a request holds the event loop: few methods may take more (kvgrpc.rpc.methods).
SMALL_BYTES = 64 * 1024

Options = tuple[tuple[str, int | str], ...]

_BOTH: Options = (
    # A frame is at most 4 MiB and a page of a list less; decoding holds the event loop, so there is a bound at all.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Either side finds the other's host or network gone, or its process stopped: the library's threads ping and answer,
    # also while the interpreter is held. Watches have quicker heartbeats of their own, sessions quicker pings.
    ("grpc.keepalive_time_ms", PING_MILLISECONDS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MILLISECONDS),
    # Without it an unanswered ping counts for a minute, whatever the line above says.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MILLISECONDS),
    # 15 KB of compressed zeros are 16 MiB that are held until somebody has looked: identity only, either way.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Between calls too, so that the next one does not find a dead connection.
    ("grpc.keepalive_permit_without_calls", 1),
    # By default pings end after two that no data follows, and a quiet stream would never notice.
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: Options = (
    *_BOTH,
    # Two servers on one port would share its calls silently, and the address would prove nothing about a death.
    ("grpc.so_reuseport", 0),
    # By default one ping in five minutes is allowed, and clients of other languages ping every 10 to 30 s.
    ("grpc.http2.min_ping_interval_without_data_ms", SERVER_SHORTEST_PING_MILLISECONDS),
    ("grpc.http2.max_ping_strikes", 2),
    # Past 1,000 calls that wait for the event loop the library drops some at random, without a reason that a client
    # could read. When all ranks come back at once there are more; Admission refuses with a reason, further up.
    ("grpc.server.max_pending_requests", 16_384),
    ("grpc.server.max_pending_requests_hard_limit", 32_768),
    # By default whoever connects and says nothing keeps the connection for two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # What a stranger may hold at once on one connection, before anybody asked who it is. How long a call may take to
    # send its headers and its body the library cannot bound (docs/bounds.md): a front can.
    ("grpc.max_concurrent_streams", MAX_CALLS_OF_A_CONNECTION),
    # What a call may send before anybody reads it stays 64 KiB: by default it grows with the connection to MiBs, for
    # each of its calls. A request that is read has the window that it needs, and sessions send little.
    ("grpc.http2.bdp_probe", 0),
    # Not max_connection_age: that cuts honest streams.
    ("grpc.max_connection_idle_ms", IDLE_MILLISECONDS),
)


@dataclass(frozen=True, slots=True)
class Pings:
    """After how long without a byte a connection is pinged, and how long its answer may take (ms)."""

    interval_ms: int
    timeout_ms: int


def server_options(largest_request: int, pings: Pings | None = None) -> Options:
    """Of a server whose services need no request above ``largest_request`` bytes. ``pings``: of a rank's sessions."""
    ours: dict[str, int] = {"grpc.max_receive_message_length": min(largest_request, MAX_MESSAGE_BYTES)}
    if pings is not None:
        ours["grpc.http2.min_ping_interval_without_data_ms"] = RANK_SHORTEST_PING_MILLISECONDS
    return _replaced(with_pings(SERVER_OPTIONS, pings), ours)


def with_pings(options: Options, pings: Pings | None) -> Options:
    """The options with other pings; None: as they are."""
    if pings is None:
        return options
    return _replaced(
        options,
        {
            "grpc.keepalive_time_ms": pings.interval_ms,
            "grpc.keepalive_timeout_ms": pings.timeout_ms,
            "grpc.http2.ping_timeout_ms": pings.timeout_ms,
        },
    )


def _replaced(options: Options, by: Mapping[str, int]) -> Options:
    return tuple((name, by.get(name, value)) for name, value in options)


CHANNEL_OPTIONS: Options = (
    *_BOTH,
    # The library's 1 s to 120 s would keep a rank away long after its registry is back.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # How long one attempt to connect may take, handshake included (20 s by default).
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # http_proxy would capture even loopback.
    ("grpc.enable_http_proxy", 0),
    # There is no service configuration of ours in DNS: do not look for one at each connection.
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.primary_user_agent", f"kvgrpc/{__version__}"),
)

# A stream of its own TCP connection: what happens to others says nothing about it.
OWN_CONNECTION: Options = (("grpc.use_local_subchannel_pool", 1),)

# Of sessions: small frames, each of which the library would answer with a ping, to learn how wide the way is. What is
# large and read has the window that it needs all the same.
SESSION: Options = (("grpc.http2.bdp_probe", 0),)

# Of questions that come seldom: a rank's server pings whoever is connected each second, and wakes both for it.
SELDOM: Options = (("grpc.client_idle_timeout_ms", 5_000),)

# The library names a Unix socket by its path, percent signs and all: servers in Rust take that for no authority.
NAMED_LOCALHOST: Options = (("grpc.default_authority", "localhost"),)


def server_name(name: str) -> Options:
    """The name that the server's certificate must have; also the authority of the calls."""
    return (("grpc.ssl_target_name_override", name), ("grpc.default_authority", name))
