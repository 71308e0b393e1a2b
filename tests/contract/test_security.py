"""Who may talk to whom: roles and methods, tokens, TLS, mutual TLS, and what is refused before it can start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
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
from kvgrpc.rpc.channel import open_channel
from kvgrpc.rpc.credentials import reloading
from kvgrpc.rpc.credentials.tokens import authorization
from kvgrpc.rpc.interceptors import ALLOWED
from kvgrpc.rpc.security import CallerRole, ClientSecurity, ServerSecurity, Token
from kvgrpc.rpc.server import add_methods
from kvgrpc.server import settings
from kvgrpc.server.port.listener import Listener
from tests.contract.certificates import OPENSSL, Authority, Certificate
from tests.contract.serving import failure, once
from tests.support.secrets import proof, secret
from tests.support.waiting import until

SECRETS = {role: f"secret-of-{role.value}" for role in CallerRole}
TOKENS = tuple(Token(role, secret) for role, secret in SECRETS.items())
WITH_TOKENS = ServerSecurity(tokens=TOKENS)
OPERATOR = ClientSecurity(token=SECRETS[CallerRole.OPERATOR])
DRAIN = "/kvgrpc.v1.ServerService/Drain"
WATCH = "/kvgrpc.v1.EventService/Watch"
ROOT = Path(__file__).parents[2]
STREAMS_OF_REQUESTS = ("KeepAlive", "Session")
STREAMS_OF_RESPONSES = ("KeepAlive", "Session", "Watch")


class Everything:
    """Answers every method of the role table with what it was sent; ``reached`` names them."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    def add_to(self, server: grpc.aio.Server) -> list[str]:
        services: dict[str, dict[str, Any]] = {}
        for path in ALLOWED:
            _, service, method = path.split("/")
            services.setdefault(service, {})[method] = self._handler(path, method)
        for name, methods in services.items():
            add_methods(server, name, methods)
        return list(services)

    def _handler(self, path: str, method: str) -> Any:
        async def single(request: bytes, context: Any) -> bytes:
            self.reached.append(path)
            return request

        async def stream(request: Any, context: Any) -> None:
            self.reached.append(path)
            await context.write(b"")

        if method in STREAMS_OF_REQUESTS:
            return grpc.stream_stream_rpc_method_handler(stream)
        if method in STREAMS_OF_RESPONSES:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(single)


@contextlib.asynccontextmanager
async def listening(security: ServerSecurity, address: str = "127.0.0.1:0") -> AsyncIterator[tuple[str, Everything]]:
    everything = Everything()
    listener = Listener()
    (bound,) = await listener.start(everything.add_to, [address], security)
    try:
        yield bound, everything
    finally:
        await listener.stop(0.0)


async def call(address: str, path: str, security: ClientSecurity | None = None, timeout: float = 5.0) -> None:
    """One whole call; raises what the caller of it would see."""
    method = path.rpartition("/")[2]
    channel: Any = open_channel(address, security, own_connection=True)
    async with channel:
        if method in STREAMS_OF_REQUESTS:
            assert await channel.stream_stream(path)(once(b""), timeout=timeout).read() == b""
        elif method in STREAMS_OF_RESPONSES:
            assert await channel.unary_stream(path)(b"", timeout=timeout).read() == b""
        else:
            assert await channel.unary_unary(path)(b"", timeout=timeout) == b""


async def refusal(address: str, path: str, security: ClientSecurity | None = None) -> KvGrpcError:
    """Asked again when the library lost the status because the request was still being written (grpc.aio, streams)."""
    for _ in range(5):
        error = await failure(call(address, path, security))
        if error.message != "Internal error from Core":
            break
    return error


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


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server_certificate(authority: Authority) -> Certificate:
    return authority.sign("engine-7.internal", "DNS:engine-7.internal,IP:127.0.0.1")


@pytest.mark.skipif(OPENSSL is None, reason="makes its certificates with openssl")
class TestTls:
    @pytest.fixture
    def tls(self, server_certificate: Certificate) -> ServerSecurity:
        return ServerSecurity(
            cert_file=server_certificate.cert_file, key_file=server_certificate.key_file, tokens=TOKENS
        )

    @pytest.fixture
    def mutual(self, server_certificate: Certificate, authority: Authority) -> ServerSecurity:
        return ServerSecurity(
            cert_file=server_certificate.cert_file,
            key_file=server_certificate.key_file,
            client_ca_file=authority.ca_file,
            tokens=TOKENS,
        )

    async def test_a_client_with_the_authority_and_a_token_calls(
        self, tls: ServerSecurity, authority: Authority
    ) -> None:
        async with listening(tls) as (address, _):
            secret = SECRETS[CallerRole.OPERATOR]
            await call(address, DRAIN, ClientSecurity(ca_file=authority.ca_file, token=secret))
            await call(
                address, "/kvgrpc.v1.EventService/Watch", ClientSecurity(ca_file=authority.ca_file, token=secret)
            )
            error = await refusal(address, DRAIN, ClientSecurity(ca_file=authority.ca_file))
            assert isinstance(error, CredentialsInvalid)

    async def test_a_client_of_another_authority_or_without_tls_gets_no_connection(
        self, tls: ServerSecurity, tmp_path: Path
    ) -> None:
        other = Authority(tmp_path)
        async with listening(tls) as (address, everything):
            for security in (ClientSecurity(ca_file=other.ca_file), None):
                error = await refusal(address, DRAIN, security)
                assert (error.reason, error.code) == (Reason.UNSPECIFIED, "UNAVAILABLE")
            assert everything.reached == []

    async def test_the_name_in_the_certificate_must_be_the_dialled_or_the_configured_one(
        self, tls: ServerSecurity, authority: Authority
    ) -> None:
        ca, secret = authority.ca_file, SECRETS[CallerRole.OPERATOR]
        async with listening(tls, "localhost:0") as (address, _):
            error = await refusal(address, DRAIN, ClientSecurity(ca_file=ca, token=secret))
            assert error.code == "UNAVAILABLE"
            named = ClientSecurity(ca_file=ca, token=secret, server_name="engine-7.internal")
            await call(address, DRAIN, named)

    @pytest.mark.parametrize(
        ("common_name", "alternative_names", "role"),
        [
            ("prefill-7.rank", "", CallerRole.RANK),
            ("operator", "", CallerRole.OPERATOR),
            ("node-7", "URI:spiffe://cluster/kvgrpc/consumer", CallerRole.CONSUMER),
            ("node-7", "DNS:node-7.internal,DNS:node-7.rank", CallerRole.RANK),
            ("ops.operator", "DNS:node-7.rank", CallerRole.RANK),
        ],
    )
    async def test_the_role_is_in_the_client_certificate(
        self, mutual: ServerSecurity, authority: Authority, common_name: str, alternative_names: str, role: CallerRole
    ) -> None:
        security = self.of(authority, authority.sign(common_name, alternative_names))
        async with listening(mutual) as (address, _):
            for path in ("/kvgrpc.v1.RegistryService/Register", DRAIN, WATCH):
                if role in ALLOWED[path]:
                    await call(address, path, security)
                else:
                    error = await refusal(address, path, security)
                    assert isinstance(error, PermissionDenied)
                    assert error.metadata["role"] == role.value

    async def test_a_certificate_without_a_role_needs_a_token(
        self, mutual: ServerSecurity, authority: Authority, caplog: pytest.LogCaptureFixture
    ) -> None:
        certificate = authority.sign("nobody-in-particular", "DNS:rank.internal")
        async with listening(mutual) as (address, _):
            error = await refusal(address, DRAIN, self.of(authority, certificate))
            assert isinstance(error, CredentialsInvalid)
            assert error.message.endswith(": rank.internal, nobody-in-particular")
            assert f"127.0.0.1 was refused {DRAIN}: {error}" in caplog.messages
            await call(address, DRAIN, self.of(authority, certificate, SECRETS[CallerRole.OPERATOR]))

    async def test_a_token_counts_before_the_certificate(self, mutual: ServerSecurity, authority: Authority) -> None:
        certificate = authority.sign("ops.operator")
        async with listening(mutual) as (address, _):
            await call(address, DRAIN, self.of(authority, certificate))
            rank = self.of(authority, certificate, SECRETS[CallerRole.RANK])
            assert isinstance(await refusal(address, DRAIN, rank), PermissionDenied)
            wrong = self.of(authority, certificate, "wrong")
            assert isinstance(await refusal(address, DRAIN, wrong), CredentialsInvalid)

    async def test_without_a_certificate_of_the_authority_there_is_no_connection(
        self, mutual: ServerSecurity, authority: Authority, tmp_path: Path
    ) -> None:
        foreign = Authority(tmp_path, "foreign").sign("ops.operator")
        async with listening(mutual) as (address, everything):
            for security in (ClientSecurity(ca_file=authority.ca_file), self.of(authority, foreign)):
                assert (await refusal(address, DRAIN, security)).code == "UNAVAILABLE"
            assert everything.reached == []

    @staticmethod
    def of(authority: Authority, certificate: Certificate, token: str = "") -> ClientSecurity:
        return ClientSecurity(
            ca_file=authority.ca_file, cert_file=certificate.cert_file, key_file=certificate.key_file, token=token
        )


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


@pytest.mark.skipif(OPENSSL is None, reason="makes its certificates with openssl")
@pytest.mark.parametrize(("environment", "said"), [({}, True), ({"GRPC_VERBOSITY": "ERROR"}, False)])
def test_a_refused_handshake_is_a_line_of_the_c_core_alone(
    tmp_path: Path, environment: dict[str, str], said: bool
) -> None:
    """As docs/watch/log.md tells operators: no other place shows it."""
    server = Authority(tmp_path).sign("localhost", "IP:127.0.0.1")
    inherited = {key: value for key, value in os.environ.items() if key not in ("GRPC_VERBOSITY", "GRPC_TRACE")}
    command = [sys.executable, "-m", "kvgrpc", "serve", "registry", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--cert-file", server.cert_file, "--key-file", server.key_file],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=inherited | environment,
        text=True,
    ) as registry:
        assert registry.stdout is not None and registry.stderr is not None
        try:
            address = registry.stdout.readline().split()[-1]
            host, port = address.rsplit(":", 1)
            with socket.create_connection((host, int(port)), 10) as plaintext:
                plaintext.sendall(b"GET / HTTP/1.1\r\n\r\n")
                plaintext.settimeout(20)
                while plaintext.recv(4096):
                    pass
        finally:
            registry.terminate()
            _, stderr = registry.communicate(timeout=30)
    assert ("Handshake failed with error SSL_ERROR_SSL" in stderr) is said
    assert "127.0.0.1:" not in stderr.replace(address, "")
