"""Certificates that are replaced while ranks run: a session's next dial shows the new one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.errors import Reason
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity
from kvgrpc.transfer import KVPoll
from tests.support.certificates import OPENSSL, Authority, Certificate
from tests.support.hostile.honest_pair import ROOMS, TIMING
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import core_of, receiver_of, sender_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="makes its certificates with openssl")


class Member:
    """A rank with a certificate of its own, which may be replaced."""

    def __init__(self, authority: Authority, folder: Path, engine: str, role: str, name: str, registry: str) -> None:
        folder.mkdir()
        self._authority = authority
        self._files = Certificate(str(folder / "cert.pem"), str(folder / "key.pem"))
        self.carry(name)
        server = ServerSecurity(self._files.cert_file, self._files.key_file, client_ca_file=authority.ca_file)
        client = ClientSecurity(
            ca_file=authority.ca_file, cert_file=self._files.cert_file, key_file=self._files.key_file
        )
        settings = {"timing": TIMING, "registry": registry, "server_security": server, "client_security": client}
        self.host = RankHost(engine, role, settings)

    def carry(self, name: str) -> None:
        """Puts a certificate of that name where its files are."""
        made = self._authority.sign("rank", f"IP:127.0.0.1,DNS:{name}")
        shutil.copy(made.key_file, self._files.key_file)
        shutil.copy(made.cert_file, self._files.cert_file)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Member, Member]]:
    """A prefill, and a decode with the certificate of another decode engine."""
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder)
    prefill = Member(authority, folder / "P", "PT", "PREFILL", "PT.prefill.rank", "embedded")
    decode = Member(authority, folder / "D", "DT", "DECODE", "elsewhere.decode.rank", "")
    yield prefill, decode
    decode.host.close(1.0)
    prefill.host.close(1.0)


def test_a_session_dials_with_the_certificate_that_is_there_now(members: tuple[Member, Member]) -> None:
    prefill, decode = members
    bootstrap = f"{prefill.host.rank.address}/PT"
    refused = receiver_of(decode.host, bootstrap, next(ROOMS))
    wait_until(lambda: refused.poll() is KVPoll.Failed, 30)
    assert refused.failure.reason is Reason.IDENTITY_MISMATCH and "elsewhere" in refused.failure.message
    decode.carry("DT.decode.rank")
    welcome = receiver_of(decode.host, bootstrap, next(ROOMS))
    wait_until(lambda: welcome.poll() is not KVPoll.Bootstrapping, 30)
    assert welcome.failure is None


def test_a_session_that_broke_is_dialled_again_with_the_certificate_that_is_there_now(
    members: tuple[Member, Member],
) -> None:
    prefill, decode = members
    decode.carry("DT.decode.rank")
    room = next(ROOMS)
    receiver = receiver_of(decode.host, f"{prefill.host.rank.address}/PT", room)
    wait_until(lambda: receiver.poll() is KVPoll.WaitingForInput, 30)
    decode.carry("elsewhere.decode.rank")
    transfer = decode.host.rank.transfer
    for session in list(transfer._sessions.values()):
        transfer._loop.call_soon_threadsafe(session.call.cancel)
    wait_until(lambda: receiver.poll() is KVPoll.Failed, 30)
    assert receiver.failure.reason is Reason.IDENTITY_MISMATCH and "elsewhere" in receiver.failure.message
    decode.carry("DT.decode.rank")
    # A dial under way with the other certificate would be refused to the next room as well: none is, where the pair is
    # up again or is gone. Rooms may be gone before.
    wait_until(lambda: not core_of(decode.host).rooms, 30)
    wait_until(lambda: all(pair.up for pair in list(core_of(decode.host).pairs.values())), 30)
    again = receiver_of(decode.host, f"{prefill.host.rank.address}/PT", next(ROOMS))
    sender = sender_of(prefill.host, again.room)
    again.init([1], 0)
    wait_until(lambda: sender.poll() is KVPoll.WaitingForInput, 30)
    again.abort()
    wait_until(lambda: not core_of(decode.host).rooms, 30)
