"""Which addresses are understood, advertised and dialled."""

from __future__ import annotations

import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.errors import AddressNotAllowed, InvalidRequest
from kvgrpc.net import (
    AddressPolicy,
    BootstrapAddress,
    advertised,
    caller_address,
    check_advertised,
    check_listen,
    check_target,
    is_local,
    is_wildcard,
    parse_bootstrap_addr,
    peer_is_local,
    socket_passing_on,
    split,
    split_with_port,
)
from kvgrpc.registry.addresses import check_events_endpoint


@pytest.mark.parametrize(
    ("text", "host", "port", "engine"),
    [
        ("10.0.0.7:9000", "10.0.0.7", 9000, ""),
        ("prefill-0.Example:9000/P_1.a", "prefill-0.example", 9000, "P_1.a"),
        ("host.", "host", 8998, ""),
        ("host/P", "host", 8998, "P"),
        ("[fe80::1]:9000/P", "fe80::1", 9000, "P"),
        ("[FE80:0::1]", "fe80::1", 8998, ""),
        # Without brackets the last group is the port if the rest is an address.
        ("fe80::1:9000", "fe80::1", 9000, ""),
        ("::1:9000/P", "::1", 9000, "P"),
        ("1:2:3:4:5:6:7:8:9000", "1:2:3:4:5:6:7:8", 9000, ""),
        ("::1", "::1", 8998, ""),
        ("1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7:8", 8998, ""),
        ("[::ffff:10.0.0.7]:9000", "10.0.0.7", 9000, ""),
    ],
)
def test_bootstrap_addresses_are_understood(text: str, host: str, port: int, engine: str) -> None:
    assert parse_bootstrap_addr(text) == BootstrapAddress(host, port, engine)


@pytest.mark.parametrize(
    "text",
    ["", ":9000", "/P", "host:", "host:0", "host:65536", "host:-1", "host:1/", "host:1/a b", "a..b", "http://host:1",
     "[host]:1", "[::1", "[::1]9000", "a b:1", "127.1:80", "0x7f000001:80", "2130706433", "host:1:2", "hóst:1"],
)  # fmt: skip
def test_nonsense_is_refused_and_named(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_bootstrap_addr(text)
    assert refused.value.metadata["field"] == "bootstrap_addr"


@given(st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        address = parse_bootstrap_addr(text)
    except InvalidRequest:
        return
    again = parse_bootstrap_addr(address.target + (f"/{address.engine}" if address.engine else ""))
    assert again == address


@given(st.ip_addresses(), st.integers(1, 65_535))
def test_a_target_reads_as_the_address_that_it_was_made_of(ip: object, port: int) -> None:
    target = parse_bootstrap_addr(f"[{ip}]:{port}" if ":" in str(ip) else f"{ip}:{port}").target
    assert parse_bootstrap_addr(target).target == target


POLICY = AddressPolicy(
    allow=["10.1.0.0/16", "192.168.7.7", "prefill.example", "fd00::/8"],
    configured=["registry.example", "10.9.9.9:7000"],
)


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "[::ffff:127.0.0.1]:1",
     "registry.example", "REGISTRY.example.:8998", "10.9.9.9:7000/P",
     "10.1.2.3:1", "[::ffff:10.1.2.3]:1", "192.168.7.7:22", "prefill.example:1", "[fd00::5]:1"],
)  # fmt: skip
def test_loopback_configured_and_listed_addresses_may_be_dialled(text: str) -> None:
    POLICY.check(parse_bootstrap_addr(text))


@pytest.mark.parametrize(
    "text",
    ["10.2.0.1:1", "registry.example:22", "10.9.9.9:7001", "sub.prefill.example:1", "169.254.169.254:80",
     "[fe80::1]:1", "0.0.0.0:1", "localhost.example:1", "x.localhost:1"],
)  # fmt: skip
def test_any_other_address_may_not_and_the_error_names_the_key(text: str) -> None:
    with pytest.raises(AddressNotAllowed) as refused:
        POLICY.check(parse_bootstrap_addr(text))
    assert refused.value.metadata["configKey"] == "bootstrap_allow"
    assert "bootstrap_allow (KVGRPC_BOOTSTRAP_ALLOW)" in refused.value.message


def test_without_a_list_only_loopback_may_be_dialled() -> None:
    AddressPolicy().check(parse_bootstrap_addr("localhost"))
    with pytest.raises(AddressNotAllowed):
        AddressPolicy().check(parse_bootstrap_addr("10.0.0.1"))


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "a b", "http://x", "", "1.2"])
def test_a_bad_entry_of_the_list_is_refused_at_once(entry: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        AddressPolicy(allow=[entry])
    assert refused.value.metadata["field"] == "bootstrap_allow"


@pytest.mark.parametrize("address", ["10.0.0.1:1", "host:65535", "[fe80::1]:1", "a_b-c.d:1"])
def test_dialable_addresses_may_be_advertised_from_anywhere(address: str) -> None:
    check_advertised(address, field="grpc", peer_is_local=False)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "*:1", ":1", "[::ffff:0.0.0.0]:1"])
def test_a_wildcard_is_not_advertised_and_the_remedy_is_named(address: str) -> None:
    with pytest.raises(AddressNotAllowed) as refused:
        check_advertised(address, field="grpc", peer_is_local=True)
    assert refused.value.metadata == {"address": address, "configKey": "advertise"}


@pytest.mark.parametrize("address", ["[10.0.0.1]:1", "[host]:1", "[]:1"])
def test_brackets_around_what_is_no_ipv6_are_no_wildcard(address: str) -> None:
    with pytest.raises(InvalidRequest, match="IPv6 in brackets") as refused:
        check_advertised(address, field="grpc", peer_is_local=True)
    assert refused.value.metadata["field"] == "grpc"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1"])
def test_loopback_is_advertised_on_the_registry_s_own_host_only(address: str) -> None:
    check_advertised(address, field="grpc", peer_is_local=True)
    with pytest.raises(AddressNotAllowed):
        check_advertised(address, field="grpc", peer_is_local=False)


@pytest.mark.parametrize(
    "address", ["host", "host:0", "host:x", "fe80::1:9000", "::ffff:10.0.0.1:80", "[::1]", "a b:1"]
)
def test_bad_syntax_is_an_invalid_request(address: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_advertised(address, field="rows[0].endpoints.grpc", peer_is_local=True)
    assert refused.value.violations[0].field == "rows[0].endpoints.grpc"


@pytest.mark.parametrize(
    ("host", "address", "local"),
    [
        ("10.0.0.7", "10.0.0.7:4321", False),
        ("127.0.0.1", "127.0.0.1:4321", True),
        ("::1", "[::1]:4321", True),
        ("fe80::1%eth0", "[fe80::1%eth0]:4321", False),
    ],
)
def test_of_a_connection_that_was_passed_on_it_counts_where_it_came_from(host: str, address: str, local: bool) -> None:
    # As gRPC names the other end: brackets and percent signs encoded.
    name = urllib.parse.quote(socket_passing_on(host, 4321).removeprefix("\0"), safe=":/")
    peer = f"unix-abstract:{name}"
    assert caller_address(peer) == address
    assert peer_is_local(peer) is local


def test_a_unix_socket_that_nobody_named_for_others_is_local_as_it_is() -> None:
    assert caller_address("unix:") == "unix:" and peer_is_local("unix:")
    assert not peer_is_local("unix-abstract:kvgrpc-passed-on/nobody")


def test_event_endpoints_follow_the_same_rules() -> None:
    check_events_endpoint("tcp://10.0.0.1:5557", field="events_pub", peer_is_local=False)
    check_events_endpoint("ipc:///tmp/events", field="events_pub", peer_is_local=True)
    for refused in ("tcp://*:5557", "tcp://127.0.0.1:5557", "ipc:///tmp/events"):
        with pytest.raises(AddressNotAllowed):
            check_events_endpoint(refused, field="events_pub", peer_is_local=False)
    for bad in ("10.0.0.1:5557", "udp://10.0.0.1:5557", "tcp://", "tcp://host"):
        with pytest.raises(InvalidRequest):
            check_events_endpoint(bad, field="events_pub", peer_is_local=True)


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:1234", True),
        ("ipv6:%5B::1%5D:1234", True),
        ("ipv6:[::ffff:127.0.0.1]:1234", True),
        ("unix:", True),
        ("unix:/run/kvgrpc.sock", True),
        ("ipv4:10.0.0.1:1234", False),
        ("ipv6:%5Bfe80::1%5D:1234", False),
        ("vsock:1:2", False),
        ("", False),
    ],
)
def test_a_peer_is_local_by_its_socket(peer: str, local: bool) -> None:
    assert peer_is_local(peer) is local


@pytest.mark.parametrize(
    ("bound", "advertise", "dialled"),
    [
        ("127.0.0.1:9", "", "127.0.0.1:9"),
        ("[::]:9", "fd00::5", "[fd00::5]:9"),
        ("[::]:9", "[fd00::5]", "[fd00::5]:9"),
        ("[::]:9", "[fd00::5]:7", "[fd00::5]:7"),
        ("0.0.0.0:9", "host-a", "host-a:9"),
        ("0.0.0.0:9", "host-a:7", "host-a:7"),
    ],
)
def test_the_bound_port_unless_the_advertised_one_names_its_own(bound: str, advertise: str, dialled: str) -> None:
    assert advertised(bound, advertise) == dialled


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("fd00::5", ("fd00::5", "")),
        ("[fd00::5]", ("fd00::5", "")),
        ("[fd00::5]:7", ("fd00::5", "7")),
        ("10.0.0.7", ("10.0.0.7", "")),
        ("10.0.0.7:7", ("10.0.0.7", "7")),
        (":7", ("", "7")),
    ],
)
def test_an_ipv6_address_stays_whole(address: str, parts: tuple[str, str]) -> None:
    assert split(address) == parts


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.2:4312", "10.0.0.2:4312"),
        ("ipv6:%5B::1%5D:80", "[::1]:80"),
        ("unix:/run/kvgrpc.sock", "unix:/run/kvgrpc.sock"),
        ("", ""),
    ],
)
def test_a_caller_is_shown_as_addresses_are_written(peer: str, address: str) -> None:
    assert caller_address(peer) == address


@pytest.mark.parametrize("address", ["host:1", "10.0.0.1:65535", "[fe80::1]:80", "unix:/run/x", "unix-abstract:x"])
def test_what_can_be_dialled_is_a_target(address: str) -> None:
    assert check_target(address) == address


@pytest.mark.parametrize(
    "address",
    ["", None, 8998, "localhost", "host:", "host:0", "host:22222222", ":1", "fe80::1:80", "http://host:1", "[host]:1",
     "a b:1", "unix:", "host:1/P", "127.1:80", b"host:1"],
)  # fmt: skip
def test_what_cannot_be_dialled_is_refused_with_its_field_and_value(address: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_target(address, "server")
    assert refused.value.metadata["field"] == "server"
    assert str(address)[:20] in refused.value.metadata["value"]
    assert "host:port" in refused.value.metadata["rule"]


@pytest.mark.parametrize("address", ["0.0.0.0:0", ":8998", "[::]:0", "*:1", "unix:/run/x"])
def test_a_server_may_bind_wildcards_and_free_ports(address: str) -> None:
    assert check_listen(address) == address


@pytest.mark.parametrize("address", ["", "localhost", "host:65536", "host:-1", "fe80::1:80", None, 80])
def test_a_server_binds_nothing_else(address: object) -> None:
    with pytest.raises(InvalidRequest):
        check_listen(address)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("host:1", ("host", "1")),
        ("*:5557", ("*", "5557")),
        ("[::]:5557", ("::", "5557")),
        (":::5557", ("::", "5557")),
        ("fd00::1:5557", ("fd00::1", "5557")),
        ("host", ("", "host")),
    ],
)
def test_where_a_port_is_always_there_the_last_group_is_it(address: str, parts: tuple[str, str]) -> None:
    assert split_with_port(address) == parts


@pytest.mark.parametrize(
    ("address", "local"),
    [
        *(("unix:/run/kvgrpc.sock", True), ("localhost:1", True), ("127.0.0.9:1", True), ("[::1]:1", True)),
        *(("10.0.0.1:1", False), ("0.0.0.0:1", False), ("prefill-0:1", False), ("[fe80::1]:1", False)),
    ],
)
def test_only_loopback_and_unix_sockets_are_local(address: str, local: bool) -> None:
    assert is_local(address) is local


def test_wildcards_mean_every_address() -> None:
    assert [is_wildcard(host) for host in ("0.0.0.0", "::", "127.0.0.1", "prefill-0")] == [True, True, False, False]


def test_a_network_may_be_listed_by_any_address_in_it_and_a_host_by_its_name() -> None:
    policy = AddressPolicy(allow=["10.1.2.3/16", "prefill-0"])
    for allowed in ("10.1.9.9:1", "prefill-0:1"):
        policy.check(parse_bootstrap_addr(allowed))
    with pytest.raises(AddressNotAllowed):
        policy.check(parse_bootstrap_addr("prefill-1:1"))


@pytest.mark.parametrize("address", ["::1:50051", "fe80::1:8998", "a:1:2"])
def test_bare_ipv6_is_not_advertised(address: str) -> None:
    with pytest.raises(InvalidRequest):
        check_advertised(address, field="grpc", peer_is_local=True)
