"""A hand-off where everything is protected: TLS on every port, tokens with roles, and nobody else gets in."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kvgrpc.dataplane
from kvgrpc.client import ClientSecurity, SyncClient
from kvgrpc.errors import CredentialsInvalid, PermissionDenied, Reason
from kvgrpc.model import Pool, PoolKind, Region, Role
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.server import Rank, RankConfig, RegistryServer, open_rank, settings
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender
from tests.support.certificates import OPENSSL, Authority, Certificate

PAGES, PAGE_BYTES = 16, 512


pytestmark = pytest.mark.skipif(OPENSSL is None, reason="makes its certificates with openssl")


@dataclass(frozen=True)
class Files:
    """What an operator would hand out."""

    ca: str
    certificate: Certificate
    tokens: str


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("security")
    authority = Authority(folder)
    tokens = folder / "tokens"
    tokens.write_text("rank:the-secret-of-ranks\noperator:the-secret-of-operators\nconsumer:the-secret-of-consumers\n")
    return Files(authority.ca_file, authority.sign("ranks", "IP:127.0.0.1"), str(tokens))


class Member:
    """A rank with TLS and tokens, configured as an operator would: by flat settings."""

    def __init__(self, engine: str, role: Role, files: Files, token: str, registry: str = "") -> None:
        plane = kvgrpc.dataplane.open_plane("shm")
        address = plane.allocate(PAGES * PAGE_BYTES)
        self.memory = np.ctypeslib.as_array((ctypes.c_uint8 * (PAGES * PAGE_BYTES)).from_address(address))
        region = Region(0, "kv", address, PAGE_BYTES, PAGE_BYTES)
        flat = {
            "cert_file": files.certificate.cert_file,
            "key_file": files.certificate.key_file,
            "ca_file": files.ca,
            "tokens_file": files.tokens,
            "token": token,
            "registry": registry,
            "bootstrap_allow": "127.0.0.1",
        }
        self.rank: Rank[Any] = open_rank(
            RankConfig(
                engine=engine,
                role=role,
                pools=(Pool("kv", PoolKind.KV, 16, PAGES, "uint8", (region,)),),
                data_plane=plane,
                **settings(flat, {}),
            )
        )


@pytest.fixture(scope="module")
def prefill(files: Files) -> Iterator[Member]:
    member = Member("P", Role.PREFILL, files, "the-secret-of-ranks", "embedded")
    yield member
    member.rank.close(2.0)


def open_decode(files: Files, token: str) -> Member:
    return Member("D", Role.DECODE, files, token)


def handed_over(prefill: Member, decode: Member, room: int) -> KVReceiver:
    receiver = KVReceiver(decode.rank.transfer, prefill.rank.address, room)
    receiver.init([3, 4])
    sender = KVSender(prefill.rank.transfer, prefill.rank.address, room)
    sender.init(2)
    sender.send([1, 2])
    ended(receiver)
    sender.close()
    return receiver


def ended(receiver: KVReceiver) -> KVPoll:
    deadline = time.monotonic() + 20.0
    while (poll := receiver.poll()) not in (KVPoll.Success, KVPoll.Failed):
        assert time.monotonic() < deadline, "the room did not end in time"
        time.sleep(0.005)
    return poll


def test_ranks_with_the_token_hand_over_through_tls(prefill: Member, files: Files) -> None:
    decode = open_decode(files, "the-secret-of-ranks")
    try:
        prefill.memory[:] = np.arange(PAGES * PAGE_BYTES, dtype=np.uint64).astype(np.uint8) + 7
        receiver = handed_over(prefill, decode, 1)
        assert receiver.poll() is KVPoll.Success, receiver.failure
        assert (decode.memory[3 * PAGE_BYTES : 5 * PAGE_BYTES] == prefill.memory[PAGE_BYTES : 3 * PAGE_BYTES]).all()
    finally:
        decode.rank.close(2.0)


NO_RANKS = pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("", Reason.CREDENTIALS_INVALID),
        ("wrong", Reason.CREDENTIALS_INVALID),
        ("the-secret-of-consumers", Reason.PERMISSION_DENIED),
    ],
)


@NO_RANKS
def test_who_is_no_rank_gets_a_failed_room_with_the_reason(
    prefill: Member, files: Files, token: str, reason: Reason
) -> None:
    decode = open_decode(files, token)
    try:
        receiver = handed_over(prefill, decode, 2)
        assert receiver.failure is not None and receiver.failure.reason is reason
        assert receiver.release_safe
    finally:
        decode.rank.close(2.0)


@NO_RANKS
def test_the_session_says_so_where_the_registry_lets_everybody_in(files: Files, token: str, reason: Reason) -> None:
    """A refused stream loses its status now and then, while decode writes its hello: the next dial brings it."""
    certificate = files.certificate
    security = ServerSecurity(cert_file=certificate.cert_file, key_file=certificate.key_file)
    registry = RegistryServer(["127.0.0.1:0"], security).open()
    prefill = Member("P", Role.PREFILL, files, "the-secret-of-ranks", registry.address)
    decode = open_decode(files, token)
    try:
        for room in range(1, 11):
            receiver = KVReceiver(decode.rank.transfer, registry.address, room)
            receiver.init([3, 4])
            assert ended(receiver) is KVPoll.Failed
            assert receiver.failure is not None and receiver.failure.reason is reason
            assert receiver.release_safe
    finally:
        decode.rank.close(2.0)
        prefill.rank.close(2.0)
        registry.close()


def test_settings_are_told_to_operators_alone_and_no_secret_is_among_them(prefill: Member, files: Files) -> None:
    def told(token: str) -> Any:
        with SyncClient(prefill.rank.address, ClientSecurity(ca_file=files.ca, token=token)) as client:
            return client.get_server_info()

    to_operator = told("the-secret-of-operators")
    settings_told = {each.name: each.value for each in to_operator.settings}
    assert (settings_told["cert_file"], settings_told["token"]) == (files.certificate.cert_file, "set")
    assert "the-secret" not in str(to_operator)
    for token in ("the-secret-of-consumers", "the-secret-of-ranks"):
        assert not told(token).settings
    security = to_operator.security
    assert (security.tls, security.tokens, security.client_certificates) == (True, True, False)
    left = security.certificate_end_time.ToSeconds() - time.time()
    assert 86_400 < left <= 2 * 86_400, "made for two days"


def test_people_need_a_role_too(prefill: Member, files: Files) -> None:
    def client(token: str) -> SyncClient:
        return SyncClient(prefill.rank.address, ClientSecurity(ca_file=files.ca, token=token))

    with client("the-secret-of-operators") as operator:
        assert operator.get_server_info().version
        assert operator.list_rooms() is not None
    with client("the-secret-of-consumers") as consumer, pytest.raises(PermissionDenied):
        consumer.list_rooms()
    with client("") as nobody, pytest.raises(CredentialsInvalid):
        nobody.get_server_info()
