"""Whoever has the token of one rank is not every rank: a session's hello is held to it, and to this host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvgrpc.errors import Failure, Reason
from kvgrpc.model import MAX_EPOCH, RankRef
from kvgrpc.rpc.security import ServerSecurity
from tests.support.hostile.honest_pair import TIMING
from tests.support.rank_host import RankHost
from tests.support.secrets import proof, secret, tokens_of
from tests.support.transfer_peers import DecodeClient, Memory, closed_in_the_end, core_of

TOKENS = """
rank:any
rank decode-*:engines
rank decode-* role=decode:decodes
rank decode-* role=prefill:prefills
rank prefill-0:another
"""
Dial = Callable[..., DecodeClient]


@pytest.fixture(scope="module")
def guarded() -> Iterator[RankHost]:
    """A prefill rank that asks who calls."""
    security = {
        "server_security": ServerSecurity(tokens=tokens_of(TOKENS)),
        "client_security": proof("any"),
    }
    host = RankHost("G", "PREFILL", {"timing": TIMING, **security})
    yield host
    host.close(1.0)


@pytest.fixture
def dial_as(guarded: RankHost, memory: Memory) -> Iterator[Dial]:
    def make(token: str, engine: str = "decode-7") -> DecodeClient:
        client = DecodeClient(guarded, memory, engine)
        client.secret = secret(token)
        return client

    with closed_in_the_end(make) as making:
        yield making


def as_at(client: DecodeClient, epoch: int) -> DecodeClient:
    client.ref = RankRef(client.ref.rank, epoch)
    return client


class TestWhoAHelloSpeaksFor:
    @pytest.mark.parametrize("token", ["any", "engines", "decodes"])
    def test_its_own_rank_is_welcomed(self, dial_as: Dial, token: str) -> None:
        dial_as(token).open()

    @pytest.mark.parametrize(
        ("token", "engine"),
        [("another", "decode-7"), ("prefills", "decode-7"), ("decodes", "prefill-0"), ("engines", "victim")],
    )
    def test_another_rank_is_refused_and_nothing_of_it_is_known(
        self, guarded: RankHost, dial_as: Dial, token: str, engine: str
    ) -> None:
        client = dial_as(token, engine)
        refused = client.refused()
        assert refused.reason is Reason.IDENTITY_MISMATCH
        assert set(refused.metadata) == {"rank", "caller", "scope"} and "hello.opener" in refused.message
        assert client.over() is None and client.ref not in core_of(guarded).pairs

    def test_so_it_cannot_end_the_session_of_the_rank_that_is_there(self, dial_as: Dial) -> None:
        honest, thief = dial_as("decodes").open(), dial_as("another")
        thief.ref = honest.ref
        assert thief.refused(stream=2).reason is Reason.IDENTITY_MISMATCH
        honest.again(3).close()


class TestEpochsOfAHello:
    def refused(self, client: DecodeClient) -> Failure:
        refused = client.refused()
        assert refused.reason is Reason.INVALID_REQUEST and refused.metadata["field"] == "hello.opener.epoch"
        return refused

    @pytest.mark.parametrize("ahead", [11 * 60, 86_400, None])
    def test_one_that_would_fence_every_later_incarnation_is_refused(
        self, guarded: RankHost, dial_as: Dial, ahead: int | None
    ) -> None:
        epoch = MAX_EPOCH if ahead is None else round((time.time() + ahead) * 1e6)
        refused = self.refused(as_at(dial_as("any", "decode-9"), epoch))
        assert "10 minutes" in refused.metadata["rule"] and refused.metadata["value"] == str(epoch)
        dial_as("any", "decode-9").open()

    def test_a_clock_that_is_some_minutes_ahead_is_nobodys_fault(self, dial_as: Dial) -> None:
        as_at(dial_as("any", "decode-10"), round((time.time() + 9 * 60) * 1e6)).open()
