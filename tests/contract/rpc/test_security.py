"""Who may talk to whom: roles and methods, tokens, TLS, mutual TLS, and what is refused before it can start."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvgrpc.errors import (
    AddressNotAllowed,
    CredentialsInvalid,
    InvalidRequest,
    KvGrpcError,
    PermissionDenied,
    Reason,
)
from kvgrpc.observability import metrics
from kvgrpc.observability.logging import RateLimited
from kvgrpc.rpc.credentials import reloading
from kvgrpc.rpc.credentials.tokens import authorization
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.interceptors import ALLOWED
from kvgrpc.rpc.security import CallerRole, ClientSecurity, ServerSecurity
from kvgrpc.rpc.server import add_methods
from kvgrpc.server import settings
from kvgrpc.server.port.listener import Listener
from tests.support.secrets import proof, secret
from tests.support.secured import (
    DRAIN,
    OPERATOR,
    SECRETS,
    TOKENS,
    WITH_TOKENS,
    Everything,
    call,
    listening,
    refusal,
)
from tests.support.serving import failure, once
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]


class TestRolesAndMethods:
    def test_the_table_says_what_the_protos_say(self) -> None:
        said = {}
        for proto in sorted((ROOT / "protos/kvgrpc/v1").glob("*_service.proto")):
            text = proto.read_text()
            for service, body in re.findall(r"^service (\w+) {\n(.*?)^}", text, re.MULTILINE | re.DOTALL):
                for comment, method in re.findall(r"((?:^ *//.*\n)+) *rpc (\w+)\(", body, re.MULTILINE):
                    (roles,) = re.findall(r"Roles: ([a-z, ]+)\.", comment)
                    said[f"/kvgrpc.v1.{service}/{method}"] = frozenset(CallerRole(role) for role in roles.split(", "))
        assert said == ALLOWED

    async def test_each_role_reaches_its_methods_and_no_other(self) -> None:
        async with listening(WITH_TOKENS) as (address, everything):
            for role, secret in SECRETS.items():
                everything.reached.clear()
                for path in ALLOWED:
                    if role in ALLOWED[path]:
                        await call(address, path, ClientSecurity(token=secret))
                    else:
                        error = await refusal(address, path, ClientSecurity(token=secret))
                        assert isinstance(error, PermissionDenied)
                        names = ", ".join(sorted(each.value for each in ALLOWED[path]))
                        assert error.metadata == {"method": path, "role": role.value, "allowed": names}
                allowed = [path for path in ALLOWED if role in ALLOWED[path]]
                assert everything.reached == allowed, "what is refused never reaches a servicer"

    @pytest.mark.parametrize("path", sorted(ALLOWED))
    async def test_without_a_valid_token_nothing_is_reached(self, path: str) -> None:
        async with listening(WITH_TOKENS) as (address, everything):
            for security in (None, ClientSecurity(token="wrong"), ClientSecurity(token=SECRETS[CallerRole.RANK][:-1])):
                error = await refusal(address, path, security)
                assert isinstance(error, CredentialsInvalid)
                assert "secret" not in str(error.metadata) + error.message
            assert everything.reached == []

    async def test_a_method_that_nobody_was_given_is_for_nobody(self) -> None:
        def add(server: grpc.aio.Server) -> list[str]:
            async def answer(request: bytes, context: Any) -> bytes:
                return request

            handler: Any = grpc.unary_unary_rpc_method_handler(answer)
            add_methods(server, "test.New", {"Method": handler})
            return ["test.New"]

        listener = Listener()
        (address,) = await listener.start(add, ["127.0.0.1:0"], WITH_TOKENS)
        assert isinstance(await refusal(address, "/test.New/Method", OPERATOR), PermissionDenied)
        await listener.stop(0.0)

    @pytest.mark.parametrize("scheme", ["Basic", "bearer", "BEARER", ""])
    async def test_the_scheme_is_bearer_in_any_case(self, scheme: str) -> None:
        async with listening(WITH_TOKENS) as (address, _):
            channel: Any = open_channel(address)
            token = authorization(SECRETS[CallerRole.OPERATOR], address, int(time.time())).removeprefix("Bearer ")
            header = f"{scheme} {token}".strip()
            answer = channel.unary_unary(DRAIN)(b"", metadata=(("authorization", header),), timeout=5)
            if scheme.lower() == "bearer":
                await answer
            else:
                assert isinstance(await failure(answer), CredentialsInvalid)
            await channel.close()

    async def test_health_and_reflection_are_for_every_authenticated_caller(self) -> None:
        async with listening(WITH_TOKENS) as (address, _):
            for secret in SECRETS.values():
                async with open_channel(address, ClientSecurity(token=secret)) as channel:
                    await health(channel)
                    await services(channel)
            async with open_channel(address) as channel:
                error = await failure(services(channel))
                while error.message == "Internal error from Core":  # as in ``refusal``
                    error = await failure(services(channel))
                assert isinstance(error, CredentialsInvalid)

    async def test_a_probe_without_a_token_is_answered_unless_that_is_switched_off(self) -> None:
        async with listening(WITH_TOKENS) as (address, _), open_channel(address) as channel:
            await health(channel)
            watching: Any = health_pb2_grpc.HealthStub(channel)
            assert isinstance(
                await failure(watching.Watch(health_pb2.HealthCheckRequest(), timeout=5).read()), CredentialsInvalid
            )
        closed = replace(WITH_TOKENS, health_without_token=False)
        async with listening(closed) as (address, _), open_channel(address) as channel:
            assert isinstance(await failure(health(channel)), CredentialsInvalid)

    async def test_without_any_configuration_every_local_caller_has_every_role(self) -> None:
        async with listening(ServerSecurity()) as (address, everything):
            for path in ALLOWED:
                await call(address, path)
            assert everything.reached == list(ALLOWED)


class TestTheLog:
    async def test_a_caller_that_is_refused_is_named_with_its_method_and_never_its_token(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = refusals_counted()
        async with listening(WITH_TOKENS) as (address, _):
            for token in ("a-secret-of-others", "", SECRETS[CallerRole.CONSUMER]):
                await refusal(address, DRAIN, ClientSecurity(token=token))
        assert [message for message in caplog.messages if "was refused" in message] == [
            f"127.0.0.1 was refused {DRAIN}: CREDENTIALS_INVALID: the token is made with no key of this server: "
            "compare token_file (KVGRPC_TOKEN_FILE) here with tokens_file there",
            f"127.0.0.1 was refused {DRAIN}: CREDENTIALS_INVALID: no credentials: send the header that "
            "`kvgrpc token TARGET` prints, or a client certificate with a name that ends in .rank, .consumer or "
            ".operator",
            f"127.0.0.1 was refused {DRAIN}: PERMISSION_DENIED: {DRAIN} is for operator, not for consumer",
        ]
        assert "secret" not in caplog.text
        assert refusals_counted() == [before[0] + 2, before[1] + 1]

    async def test_many_that_are_refused_are_a_few_lines_and_a_number(self, caplog: pytest.LogCaptureFixture) -> None:
        listener = Listener()
        listener._refused = RateLimited(logging.getLogger("kvgrpc"), lines=2, seconds=0.5)
        (address,) = await listener.start(Everything().add_to, ["127.0.0.1:0"], WITH_TOKENS)
        channel: Any = open_channel(address)
        async with channel:
            await asyncio.gather(*(failure(channel.unary_unary(DRAIN)(b"", timeout=5)) for _ in range(20)))

        def told() -> tuple[int, int]:
            """Callers that have a line, and those that are a number: of one window of time, or of two."""
            more = [message for message in caplog.messages if "more like these of CREDENTIALS_INVALID" in message]
            named = sum("was refused" in message for message in caplog.messages)
            return named, sum(int(message.split()[0]) for message in more)

        await until(lambda: sum(told()) == 20)
        assert told()[0] < 10
        await listener.stop(0.0)


class TestTokenFiles:
    @pytest.fixture(autouse=True)
    def look_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reloading, "CHECK_SECONDS", 0.0)

    async def test_a_servers_tokens_follow_the_file(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        file = tmp_path / "tokens"
        file.write_text(f"# who may drain\n\noperator: {secret('first')}\n")
        async with listening(ServerSecurity(token_file=str(file))) as (address, _):
            await call(address, DRAIN, proof("first"))
            file.write_text(f"operator:{secret('second')}\nrank:{secret('third')}")
            assert isinstance(await refusal(address, DRAIN, proof("first")), CredentialsInvalid)
            await call(address, DRAIN, proof("second"))
            assert isinstance(await refusal(address, DRAIN, proof("third")), PermissionDenied)
            for broken in (f"operator:{secret('second')}\nnonsense-with-a-secret", "\udcff"):
                file.write_bytes(broken.encode(errors="surrogateescape"))
                await call(address, DRAIN, proof("second"))
            file.unlink()
            await call(address, DRAIN, proof("second"))
        assert sum("what it held before stays" in record.getMessage() for record in caplog.records) == 3
        assert "secret" not in caplog.text

    async def test_a_clients_token_follows_the_file(self, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_text("old\n")
        async with listening(WITH_TOKENS) as (address, _):
            channel: Any = open_channel(address, ClientSecurity(token_file=str(file)))
            assert isinstance(await failure(channel.unary_unary(DRAIN)(b"", timeout=5)), CredentialsInvalid)
            file.write_text(SECRETS[CallerRole.OPERATOR] + "\n")
            await channel.unary_unary(DRAIN)(b"", timeout=5)
            await channel.close()

    UNREADABLE = (None, "\udcff", "x" * 2_000_000)

    @pytest.mark.parametrize("content", [*UNREADABLE, "operator", "root:secret", "rank:"])
    async def test_a_server_does_not_start_with_a_file_that_it_cannot_use(self, file: str, content: str | None) -> None:
        with pytest.raises(InvalidRequest, match="tokens") as caught:
            await Listener().start(lambda server: [], ["127.0.0.1:0"], ServerSecurity(token_file=file))
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize("content", [*UNREADABLE, "", "two words", "tokén"])
    async def test_a_channel_does_not_open_with_one(self, file: str, content: str | None) -> None:
        with pytest.raises(InvalidRequest, match="token"):
            open_channel("127.0.0.1:1", ClientSecurity(token_file=file))

    @pytest.fixture
    def file(self, tmp_path: Path, content: str | None) -> str:
        path = tmp_path / "tokens"
        if content is not None:
            path.write_bytes(content.encode(errors="surrogateescape"))
        return str(path)


class TestWhatNothingProtects:
    OTHERS_REACH = ("0.0.0.0:0", "[::]:0", "10.0.0.7:8998", "engine-7:8998", ":8998", "[fe80::1]:8998", "1270.0.0.1:1")
    ONLY_THIS_HOST = ("127.0.0.1:0", "127.8.8.8:1", "localhost:0", "[::1]:0", "unix:/tmp/kvgrpc", "unix-abstract:name")

    @pytest.mark.parametrize("address", OTHERS_REACH)
    async def test_a_plaintext_listener_needs_insecure(self, address: str) -> None:
        for security in (ServerSecurity(), WITH_TOKENS):
            with pytest.raises(AddressNotAllowed) as caught:
                await Listener().start(lambda server: [], [address], security)
            assert names_in(caught.value) == {"cert_file", "key_file", "--insecure"}
            assert caught.value.metadata == {"address": address, "configKey": "insecure"}
        ServerSecurity(insecure=True).check(address)

    @pytest.mark.parametrize("address", OTHERS_REACH)
    def test_so_does_tls_that_lets_everybody_in(self, address: str) -> None:
        tls = {"cert_file": "server.pem", "key_file": "server.key"}
        with pytest.raises(AddressNotAllowed) as caught:
            ServerSecurity(**tls).check(address)  # type: ignore[arg-type]  # strings only
        assert names_in(caught.value) == {"client_ca_file", "tokens_file", "--insecure"}
        for more in ({"client_ca_file": "ca.pem"}, {"token_file": "tokens"}, {"tokens": TOKENS}, {"insecure": True}):
            ServerSecurity(**tls, **more).check(address)  # type: ignore[arg-type]

    @pytest.mark.parametrize("address", OTHERS_REACH)
    async def test_a_token_in_plaintext_needs_insecure(self, address: str) -> None:
        with pytest.raises(AddressNotAllowed) as caught:
            open_channel(address, OPERATOR)
        assert names_in(caught.value) == {"ca_file", "--insecure"}
        assert caught.value.metadata == {"address": address, "configKey": "insecure"}
        ClientSecurity(token="x", insecure=True).check(address)
        ClientSecurity(token="x", ca_file="ca.pem").check(address)
        ClientSecurity().check(address)

    @pytest.mark.parametrize("address", ONLY_THIS_HOST)
    def test_what_only_this_host_reaches_needs_nothing(self, address: str) -> None:
        ServerSecurity().check(address)
        OPERATOR.check(address)

    async def test_an_insecure_wildcard_listener_serves(self) -> None:
        async with listening(ServerSecurity(insecure=True), "0.0.0.0:0") as (address, _):
            await call(f"127.0.0.1:{address.rpartition(':')[2]}", DRAIN)

    @pytest.mark.parametrize(
        "half",
        [
            lambda: ServerSecurity(cert_file="x").check("127.0.0.1:0"),
            lambda: ServerSecurity(key_file="x").check("127.0.0.1:0"),
            lambda: ServerSecurity(client_ca_file="x").check("127.0.0.1:0"),
            lambda: ServerSecurity(cert_file="missing", key_file="missing").credentials(),
            lambda: ClientSecurity(cert_file="x", ca_file="x").check("127.0.0.1:0"),
            lambda: ClientSecurity(cert_file="x", key_file="x").check("127.0.0.1:0"),
            lambda: ClientSecurity(ca_file="missing").credentials(),
            lambda: ClientSecurity(token="two words").header_source("127.0.0.1:1"),
            lambda: ServerSecurity(audience=("nowhere",)).check("127.0.0.1:0"),
        ],
    )
    def test_half_a_configuration_is_refused(self, half: Callable[[], object]) -> None:
        with pytest.raises(InvalidRequest) as caught:
            half()
        assert caught.value.metadata["field"]

    def test_secrets_are_not_shown(self) -> None:
        assert "secret" not in repr(WITH_TOKENS) + repr(ClientSecurity(token="secret")) + repr(TOKENS[0])

    async def test_a_proxy_in_the_environment_is_not_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        async with listening(ServerSecurity()) as (address, _):
            await call(address, DRAIN)


def refusals_counted() -> list[float]:
    reasons = (Reason.CREDENTIALS_INVALID, Reason.PERMISSION_DENIED)
    samples = (metrics.REGISTRY.get_sample_value("kvgrpc_errors_total", {"reason": each.name}) for each in reasons)
    return [sample or 0.0 for sample in samples]


def names_in(error: KvGrpcError) -> set[str]:
    """The settings that a refusal names, each with its variable too: an engine that embeds us has no options."""
    named = set(re.findall(r"--[a-z-]+|\b[a-z_]+_file\b", error.message))
    variables = set(re.findall(r"KVGRPC_[A-Z_]+", error.message))
    assert variables == {f"KVGRPC_{name.lstrip('-').upper()}" for name in named}
    assert [name for name in variables if not settings({}, {name: "1"})] == []
    return named


async def health(channel: grpc.aio.Channel) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)


async def services(channel: Any) -> list[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    response = await stub.ServerReflectionInfo(once(request), timeout=5).read()
    return [service.name for service in response.list_services_response.service]
