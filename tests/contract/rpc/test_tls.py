"""TLS over a real server: which certificates are trusted, what a name in one is good for, and what refusals show."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvgrpc.errors import CredentialsInvalid, PermissionDenied, Reason
from kvgrpc.rpc.interceptors import ALLOWED
from kvgrpc.rpc.security import CallerRole, ClientSecurity, ServerSecurity
from tests.support.certificates import OPENSSL, Authority, Certificate
from tests.support.secured import DRAIN, SECRETS, TOKENS, WATCH, call, listening, refusal


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
