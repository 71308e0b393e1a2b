"""docs/roles.md says what each role may do: every RPC is called as every role, by token and by certificate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.errors import IdentityMismatch, InvalidRequest, PermissionDenied
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.interceptors import ALLOWED
from kvgrpc.rpc.security import CallerRole, ClientSecurity, ServerSecurity
from kvgrpc.server import RegistryServer
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import registry_service_pb2 as registry_pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from tests.support.certificates import OPENSSL, Authority
from tests.support.secrets import proof, tokens_of
from tests.support.secured import call, listening, refusal
from tests.support.serving import failure

PAGE = Path(__file__).parents[3] / "docs" / "roles.md"
ROLES = tuple(CallerRole)
TOKENS = tokens_of("\n".join(f"{role.value}:{role.value}" for role in ROLES))


def table() -> dict[str, dict[CallerRole, bool]]:
    """What the page says, by the paths of methods."""
    section = PAGE.read_text().split("## What each role may do to whom\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"]
    heads = (CallerRole.RANK, CallerRole.CONSUMER, CallerRole.OPERATOR)
    assert all(set(row[1:4]) <= {"yes", "no"} and row[4] for row in rows)
    return {
        f"/kvgrpc.v1.{row[0].strip('`')}": {role: cell == "yes" for role, cell in zip(heads, row[1:4], strict=True)}
        for row in rows
    }


def test_the_page_has_every_rpc_and_no_other() -> None:
    assert list(table()) == list(ALLOWED)


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_does_by_token_what_the_page_says(role: CallerRole) -> None:
    async with listening(ServerSecurity(tokens=TOKENS)) as (address, everything):
        await walk(address, everything, role, proof(role.value))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("roles"))


@pytest.fixture(scope="module")
def mutual(authority: Authority) -> ServerSecurity:
    own = authority.sign("server", "IP:127.0.0.1")
    return ServerSecurity(own.cert_file, own.key_file, client_ca_file=authority.ca_file)


def member(authority: Authority, name: str) -> ClientSecurity:
    own = authority.sign("member", f"DNS:{name}")
    return ClientSecurity(ca_file=authority.ca_file, cert_file=own.cert_file, key_file=own.key_file)


@pytest.mark.skipif(OPENSSL is None, reason="makes its certificates with openssl")
class TestCertificates:
    @pytest.mark.parametrize("role", ROLES)
    async def test_each_role_does_by_certificate_what_the_page_says(
        self, mutual: ServerSecurity, authority: Authority, role: CallerRole
    ) -> None:
        async with listening(mutual) as (address, everything):
            await walk(address, everything, role, member(authority, f"host-7.{role.value}"))

    @pytest.fixture
    def registry(self, mutual: ServerSecurity) -> Iterator[RegistryServer]:
        made = RegistryServer(["127.0.0.1:0"], mutual).open()
        yield made
        made.close()

    @pytest.mark.parametrize(
        ("name", "engine", "role", "may"),
        [
            ("P-1.prefill.rank", "P-1", common_pb2.ROLE_PREFILL, True),
            ("P-1.prefill.rank", "P-1", common_pb2.ROLE_DECODE, False),
            ("P-1.prefill.rank", "P-2", common_pb2.ROLE_PREFILL, False),
            ("P-1.decode.rank", "P-1", common_pb2.ROLE_PREFILL, False),
            ("host-7.rank", "anybody", common_pb2.ROLE_DECODE, True),
        ],
    )
    async def test_a_certificate_registers_and_removes_the_ranks_of_its_name_alone(
        self, registry: RegistryServer, authority: Authority, name: str, engine: str, role: Any, may: bool
    ) -> None:
        row = registry_pb.RankRow(
            rank=common_pb2.RankRef(rank=common_pb2.RankId(engine=engine), epoch=7),
            role=role,
            layout=common_pb2.Layout(dp=1, pp=1, cp=1, tp=1),
            endpoints=registry_pb.Endpoints(grpc="127.0.0.1:9"),
            data_plane="shm",
        )
        request = registry_pb.RegisterRequest(rows=[row])
        remove = registry_pb.DeregisterRequest(ranks=[row.rank])
        async with (
            open_channel(registry.address, member(authority, "all.rank")) as honest,
            open_channel(registry.address, member(authority, name)) as channel,
        ):
            stub = RegistryServiceStub(channel)
            if may:
                await stub.Register(request, timeout=10)
                assert (await stub.Deregister(remove, timeout=10)).removed == 1
                return
            assert isinstance(await failure(stub.Register(request, timeout=10)), IdentityMismatch)
            await RegistryServiceStub(honest).Register(request, timeout=10)
            assert isinstance(await failure(stub.Deregister(remove, timeout=10)), IdentityMismatch)
            assert (await RegistryServiceStub(honest).Deregister(remove, timeout=10)).removed == 1

    def test_a_stolen_certificate_without_its_key_is_nothing(
        self, registry: RegistryServer, authority: Authority
    ) -> None:
        """What a peer sees of a caller in a handshake is the certificate: it cannot be shown elsewhere."""
        seen, own = authority.sign("boss.operator"), authority.sign("evil.rank")
        both = ClientSecurity(ca_file=authority.ca_file, cert_file=seen.cert_file, key_file=own.key_file)
        with SyncClient(registry.address, both) as client, pytest.raises(InvalidRequest):
            client.drain()


async def walk(address: str, everything: Any, role: CallerRole, security: ClientSecurity) -> None:
    """Calls all that there is; what is not allowed reaches no servicer."""
    for path, may in table().items():
        everything.reached.clear()
        if may[role]:
            await call(address, path, security)
            assert everything.reached == [path]
        else:
            assert isinstance(await refusal(address, path, security), PermissionDenied)
            assert everything.reached == []
