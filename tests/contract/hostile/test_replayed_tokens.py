"""A header that somebody heard: what it is worth, for how long, and where."""

from __future__ import annotations

import time
from collections.abc import Iterator
from unittest import mock

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.errors import PermissionDenied, Reason
from kvgrpc.net import target_of
from kvgrpc.rpc.credentials.audience import Audiences
from kvgrpc.rpc.credentials.tokens import CLOCK_SKEW_SECONDS, authorization
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.server import RegistryServer
from tests.support.fleet_tokens import SECURITY, TOKENS, sent
from tests.support.secrets import bearer, proof, secret

LIST_ENGINES = "/kvgrpc.v1.RegistryService/ListEngines"
GET_ENGINE = "/kvgrpc.v1.RegistryService/GetEngine"
MARGIN_SECONDS = 5


@pytest.fixture(scope="module")
def registry() -> Iterator[RegistryServer]:
    made = RegistryServer(["127.0.0.1:0"], SECURITY).open()
    yield made
    made.close()


def made_at(registry: RegistryServer, seconds: int, name: str = "boss") -> str:
    """A header made so many seconds from now."""
    return authorization(secret(name), target_of(registry.address), int(time.time()) + seconds)


@pytest.mark.parametrize("side", [-1, 1], ids=["old", "of the future"])
def test_it_is_good_for_a_minute_either_way_and_not_longer(registry: RegistryServer, side: int) -> None:
    within, beyond = CLOCK_SKEW_SECONDS - MARGIN_SECONDS, CLOCK_SKEW_SECONDS + MARGIN_SECONDS
    assert sent(registry.address, LIST_ENGINES, made_at(registry, side * within)) is None
    assert sent(registry.address, LIST_ENGINES, made_at(registry, side * beyond)) is Reason.CREDENTIALS_EXPIRED


def test_within_it_whoever_heard_it_is_its_sender_at_that_target_for_every_rpc_of_its_role(
    registry: RegistryServer,
) -> None:
    """What docs/tokens.md says, and why tokens over plaintext outside of loopback need insecure."""
    header = bearer("index", registry.address)
    for path in (LIST_ENGINES, LIST_ENGINES, GET_ENGINE):
        assert sent(registry.address, path, header) is None
    with SyncClient(registry.address, proof("index")) as index, pytest.raises(PermissionDenied):
        index.drain()


def test_no_part_of_it_can_be_changed(registry: RegistryServer) -> None:
    """Neither the time, nor the target, nor whose it is."""
    _, _, text = bearer("index", registry.address).partition(" ")
    version, key, made, target, mac = text.split(".")
    boss = bearer("boss", registry.address).split(".")[1]
    other = bearer("index", "127.0.0.1:1").split(".")[3]
    for changed in (
        (version, boss, made, target, mac),
        (version, key, str(int(made) + 1), target, mac),
        (version, key, made, other, mac),
        (version, key, made, target, mac[:-2] + "AA"),
        (version, key, made, target, ""),
        ("kvgrpc2", key, made, target, mac),
        (version, key, made, target, mac, mac),
        (version, key, f"+{made}", target, mac),
        (version, key, made, target + "=", mac),
    ):
        assert sent(registry.address, LIST_ENGINES, "Bearer " + ".".join(changed)) is Reason.CREDENTIALS_INVALID, (
            changed
        )


class TestAWildcard:
    """It is called by every number of its host that no other host has."""

    @pytest.fixture
    def wide(self) -> Iterator[RegistryServer]:
        made = RegistryServer(["0.0.0.0:0"], ServerSecurity(tokens=TOKENS, insecure=True)).open()
        yield made
        made.close()

    @pytest.mark.parametrize("host", ["169.254.1.7", "[fe80::1]"])
    def test_a_link_local_number_is_of_every_network_and_counts_for_none(self, wide: RegistryServer, host: str) -> None:
        port = wide.address.rpartition(":")[2]
        # As where the host has it.
        with mock.patch("kvgrpc.rpc.credentials.audience.socket.socket.bind", lambda *_: None):
            header = bearer("boss", f"{host}:{port}")
            assert sent(f"127.0.0.1:{port}", LIST_ENGINES, header) is Reason.WRONG_AUDIENCE

    def test_unless_it_is_said_to_be_one(self) -> None:
        assert Audiences(["169.254.1.7:9"]).include("169.254.1.7:9", "ipv4:169.254.1.8:1")

    @pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "127.1", "0x7f000001", "name.example"])
    def test_nor_does_what_is_no_number_of_a_host(self, wide: RegistryServer, host: str) -> None:
        port = wide.address.rpartition(":")[2]
        header = authorization(secret("boss"), f"{host}:{port}", int(time.time()))
        assert sent(f"127.0.0.1:{port}", LIST_ENGINES, header) is Reason.WRONG_AUDIENCE
