"""Values that cannot be: each is refused before anything is opened, by its field, its value and what would be right."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client import (
    Client,
    ClientSecurity,
    EventFollower,
    PrefixIndex,
    SyncClient,
    SyncEventFollower,
    SyncPrefixIndex,
)
from kvgrpc.errors import InvalidRequest, PeerUnreachable
from kvgrpc.rpc.credentials import tls
from kvgrpc.rpc.credentials.tls import ServerCertificates
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.security import CallerRole, ServerSecurity, Token
from kvgrpc.server import RegistryServer
from kvgrpc.v1.prefetch_service_pb2 import PromptPages
from tests.support.certificates import OPENSSL, Authority, Certificate, openssl
from tests.support.secured import DRAIN, call, listening, refusal
from tests.support.waiting import until


def refused(make: Callable[[], object], field: str, *words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.metadata["field"] == field
    assert caught.value.metadata["value"] and caught.value.metadata["rule"]
    for word in words:
        assert word in caught.value.message


class TestAddresses:
    @pytest.mark.parametrize("address", ["", None, "localhost", "127.0.0.1:22222222", "127.0.0.1:0", 8998])
    def test_a_client_of_no_address(self, address: Any) -> None:
        refused(lambda: SyncClient(address), "address", "host:port")

    @pytest.mark.parametrize("timeout", [0.0, -1.0, 1e308, float("inf"), float("nan")])
    def test_a_client_without_an_end(self, timeout: float) -> None:
        refused(lambda: SyncClient("127.0.0.1:1", timeout=timeout), "timeout", "seconds")

    @pytest.mark.parametrize("seconds", [-1.0, 1e308, float("inf"), float("nan")])
    def test_seconds_of_a_call_that_never_ends(self, seconds: float) -> None:
        """Before anybody is asked: nobody listens here."""
        pages = PromptPages(tokens=[1])
        client = SyncClient("127.0.0.1:1")
        calls: list[tuple[Callable[[], object], str]] = [
            (lambda: client.drain(seconds), "grace"),
            (lambda: client.pin_pages(pages, seconds), "seconds"),
            (lambda: client.start_prefetch(pages, timeout=seconds), "timeout"),
            (lambda: client.start_backup(pages, timeout=seconds), "timeout"),
        ]
        for ask, field in calls:
            refused(ask, field, "0 to 86400 seconds")

    def test_a_wait_for_no_number_of_seconds(self) -> None:
        """One below 0 is what is left of a time that is over, and one without an end is the engine's to decide."""
        refused(lambda: SyncEventFollower("127.0.0.1:1").until_current(math.nan), "timeout", "0 seconds or more")
        index = SyncPrefixIndex(sources=["127.0.0.1:1"])
        refused(lambda: index.until_current(1, math.nan), "timeout", "0 seconds or more")

    @pytest.mark.parametrize("seconds", [-1.0, 1e308, float("inf"), float("nan")])
    async def test_seconds_of_a_coroutine_that_never_ends(self, seconds: float) -> None:
        pages = PromptPages(tokens=[1])
        client = Client("127.0.0.1:1")
        calls: list[tuple[Awaitable[object], str]] = [
            (client.drain(seconds), "grace"),
            (client.pin_pages(pages, seconds), "seconds"),
            (client.start_prefetch(pages, timeout=seconds), "timeout"),
            (client.start_backup(pages, timeout=seconds), "timeout"),
        ]
        if math.isnan(seconds):
            calls += [
                (EventFollower("127.0.0.1:1").until_current(seconds), "timeout"),
                (PrefixIndex(sources=["127.0.0.1:1"]).until_current(1, seconds), "timeout"),
            ]
        for asked, field in calls:
            with pytest.raises(InvalidRequest) as caught:
                await asyncio.wait_for(asked, 20.0)
            assert caught.value.metadata["field"] == field
        await client.close()

    @pytest.mark.parametrize("address", ["localhost", "127.0.0.1:22222222", ""])
    def test_a_registry_at_no_address(self, address: str) -> None:
        refused(lambda: RegistryServer([address]), "listen", "host:port")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvgrpc", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"NO_COLOR": "1"} | environment,
    )


class TestTheCommand:
    @pytest.mark.parametrize("server", ["localhost", "127.0.0.1:22222222", ""])
    def test_a_server_that_is_no_address(self, server: str) -> None:
        ran = run("engines", "-s", server)
        assert ran.returncode == 2 and "INVALID_REQUEST: --server: must be host:port" in ran.stderr
        assert "Traceback" not in ran.stderr

    def test_a_level_that_is_none(self) -> None:
        ran = run("serve", "registry", "--log-level", "foo")
        assert ran.returncode == 2 and "'foo' is not one of" in ran.stderr

    @pytest.mark.parametrize(
        ("what", "limits"),
        [
            (("registry",), '{"watches_per_caler": 3}'),
            (("registry",), "[" * 1000),
            (("index",), '{"streams": 0}'),
            (("relay", "tcp://127.0.0.1:1", "--engine", "E"), '{"streams": 0}'),
        ],
    )
    def test_limits_that_are_none(self, what: tuple[str, ...], limits: str) -> None:
        ran = run("serve", *what, "--listen", "127.0.0.1:0", KVGRPC_CALL_LIMITS=limits, KVGRPC_REGISTRY="127.0.0.1:1")
        assert ran.returncode == 2 and "INVALID_REQUEST: call_limits" in ran.stderr
        assert "Traceback" not in ran.stderr

    @pytest.mark.parametrize(
        "what",
        [
            ("registry",),
            ("index", "--source", "127.0.0.1:1"),
            pytest.param(("relay", "tcp://127.0.0.1:1", "--engine", "E"), id="relay"),
        ],
    )
    def test_every_server_takes_and_tells_its_limits(self, what: tuple[str, ...]) -> None:
        command = [sys.executable, "-m", "kvgrpc", "serve", *what, "--listen", "127.0.0.1:0"]
        environment = os.environ | {"KVGRPC_CALL_LIMITS": '{"watches_per_caller": 7}'}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            with SyncClient(address) as client:
                assert client.get_server_info().limits.calls.watches_per_caller == 7
            said = run("info", "-s", address)
            assert said.returncode == 0 and "calls: watches per caller" in said.stdout
            server.terminate()
            assert server.wait(30) == 0

    def test_a_file_that_is_not_there(self) -> None:
        ran = run("engines", KVGRPC_CA_FILE="/nowhere/ca.pem")
        assert ran.returncode == 2 and "/nowhere/ca.pem" in ran.stderr

    def test_every_option_is_a_variable_too(self) -> None:
        ran = run("rooms", KVGRPC_ROOMS_STATES="nonsense")
        assert ran.returncode == 2 and "nonsense" in ran.stderr


class TestFiles:
    def test_a_pipe_is_no_file_and_nobody_waits_for_it(self, tmp_path: Path) -> None:
        fifo = tmp_path / "tokens"
        os.mkfifo(fifo)
        security = ServerSecurity(token_file=str(fifo))
        refused(lambda: RegistryServer(["127.0.0.1:0"], security).open(), "tokens_file", "not a regular file")

    async def test_an_authority_that_is_not_there(self) -> None:
        security = ClientSecurity(ca_file="/nowhere/ca.pem")
        refused(lambda: open_channel("127.0.0.1:1", security), "ca_file", "/nowhere/ca.pem")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Certificate:
    return authority.sign("engine", "IP:127.0.0.1")


@pytest.mark.skipif(OPENSSL is None, reason="makes its certificates with openssl")
class TestCertificates:
    def test_wrong_ones_are_named_and_not_said_to_be_a_taken_port(
        self, authority: Authority, pair: Certificate, tmp_path: Path
    ) -> None:
        other = authority.sign("other", "IP:127.0.0.1")
        nonsense = tmp_path / "nonsense.pem"
        nonsense.write_text("-----BEGIN CERTIFICATE-----\nbm9uc2Vuc2U=\n-----END CERTIFICATE-----\n")
        locked = str(tmp_path / "locked.key")
        openssl("ec", "-in", pair.key_file, "-aes256", "-passout", "pass:secret", "-out", locked)
        cases = [
            (ServerSecurity(pair.key_file, pair.cert_file), "cert_file"),
            (ServerSecurity(pair.cert_file, other.key_file), "key_file"),
            (ServerSecurity(pair.cert_file, locked), "key_file"),
            (ServerSecurity(str(nonsense), pair.key_file), "key_file"),
            (ServerSecurity(pair.cert_file, pair.key_file, str(tmp_path)), "client_ca_file"),
            (ServerSecurity(pair.cert_file, pair.key_file, pair.key_file), "client_ca_file"),
        ]
        for security, field in cases:
            refused(security.credentials, field)
            refused(lambda security=security: RegistryServer(["127.0.0.1:0"], security).open(), field)  # type: ignore[misc]
        refused(ClientSecurity(ca_file=pair.key_file).credentials, "ca_file")
        swapped = ClientSecurity(ca_file=authority.ca_file, cert_file=pair.key_file, key_file=pair.cert_file)
        refused(swapped.credentials, "cert_file")

    async def test_a_server_follows_its_files_and_keeps_the_last_good_pair(
        self, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        cert, key = tmp_path / "server.pem", tmp_path / "server.key"

        def put(certificate: Certificate) -> None:
            cert.write_bytes(Path(certificate.cert_file).read_bytes())
            key.write_bytes(Path(certificate.key_file).read_bytes())

        put(authority.sign("old", "DNS:old.internal"))
        security = ServerSecurity(str(cert), str(key), tokens=(Token(CallerRole.OPERATOR, "x"),))
        old, new = (
            ClientSecurity(authority.ca_file, token="x", server_name=f"{name}.internal") for name in ("old", "new")
        )
        async with listening(security) as (address, _):
            await call(address, DRAIN, old)
            assert (await refusal(address, DRAIN, new)).code == "UNAVAILABLE"
            put(authority.sign("new", "DNS:new.internal"))
            await call(address, DRAIN, new)
            assert (await refusal(address, DRAIN, old)).code == "UNAVAILABLE"
            cert.write_text("half a cert")
            await call(address, DRAIN, new)
            await call(address, DRAIN, new)
        lines = [record for record in caplog.records if "the one before stays" in record.getMessage()]
        assert len(lines) == 1

    def test_a_handshake_reads_no_file_that_did_not_change(self, pair: Certificate, monkeypatch: Any) -> None:
        certificates = ServerCertificates(pair.cert_file, pair.key_file, "")
        monkeypatch.setattr(tls, "read_small_file", None)
        assert certificates.fetch() is None

    async def test_a_client_reads_its_own_again_when_a_call_failed(self, authority: Authority, tmp_path: Path) -> None:
        server = authority.sign("engine", "IP:127.0.0.1")
        cert, key = tmp_path / "mine.pem", tmp_path / "mine.key"

        def put(certificate: Certificate) -> None:
            cert.write_bytes(Path(certificate.cert_file).read_bytes())
            key.write_bytes(Path(certificate.key_file).read_bytes())

        put(Authority(tmp_path, "other").sign("ops.operator"))
        async with listening(ServerSecurity(server.cert_file, server.key_file, authority.ca_file)) as (address, _):
            client = Client(address, ClientSecurity(authority.ca_file, str(cert), str(key)), timeout=1.0)
            with pytest.raises(PeerUnreachable):
                await client.health()
            put(authority.sign("ops.operator"))

            async def is_served() -> bool:
                with contextlib.suppress(PeerUnreachable):
                    return await client.health() == "SERVING"
                return False

            await until(is_served)
            await client.close()
