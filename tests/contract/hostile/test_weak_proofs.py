"""A dial that is refused while the writer may live: what stands in its place must not give its pages back
(rule 4, proof of death)."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.errors import Reason
from kvgrpc.transfer import KVPoll
from kvgrpc.transfer.runtime.death_proofs import DeathProofs
from tests.support.hostile.honest_pair import ROOMS, TIMING
from tests.support.hostile.scripted_prefill import Serve, is_another, serve, told_where_to_write
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import receiver_of
from tests.support.waiting import wait_until

__all__ = ["serve"]


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each refused dial of a peer that had welcomed was taken for."""
    seen: list[bool] = []
    is_proof = DeathProofs.is_proof

    async def noted(self: DeathProofs, *arguments: Any, was_welcomed: bool) -> bool:
        found = await is_proof(self, *arguments, was_welcomed=was_welcomed)
        if was_welcomed:
            seen.append(found)
        return found

    monkeypatch.setattr(DeathProofs, "is_proof", noted)
    return seen


def test_a_name_that_still_means_the_same_address_proves_the_death(decode: RankHost, serve: Serve) -> None:
    server = serve(address="localhost:0")
    receiver = told_where_to_write(decode, server)
    server.close()
    wait_until(lambda: receiver.poll() is KVPoll.Failed and receiver.release_safe)


def test_a_name_that_means_another_address_now_gives_no_page_back(
    decode: RankHost, serve: Serve, proofs: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(address="localhost:0")
    receiver = told_where_to_write(decode, server)

    def elsewhere(*_: object, **__: object) -> list[Any]:
        return [(2, 1, 6, "", ("127.0.0.77", 9))]

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", elsewhere)
        server.close()
        wait_until(lambda: receiver.poll() is KVPoll.Failed and len(proofs) >= 4)
        assert receiver.failure.reason is Reason.PEER_LOST
        assert not any(proofs) and not receiver.release_safe and decode.rank.transfer.held_pages == 2
    wait_until(lambda: receiver.release_safe)


def test_where_it_is_told_to_a_decode_believes_an_epoch_only(serve: Serve, proofs: list[bool]) -> None:
    decode = RankHost("D2", "DECODE", {"timing": TIMING, "refusal_proves_death": False})
    try:
        server = serve()
        receiver = told_where_to_write(decode, server)
        server.close()
        wait_until(lambda: receiver.poll() is KVPoll.Failed and len(proofs) >= 4)
        assert not any(proofs) and not receiver.release_safe
        serve(is_another, server.address)
        wait_until(lambda: receiver.release_safe)
    finally:
        decode.close(1.0)


@pytest.mark.parametrize("proves", [True, False])
def test_an_address_whose_refusal_proves_nothing_is_not_remembered_as_dead(
    decode: RankHost, serve: Serve, monkeypatch: pytest.MonkeyPatch, proves: bool
) -> None:
    """A proxy refuses in front of a prefill that is just coming up; all its rooms failed from then on."""
    manager: Any = decode.rank.transfer
    monkeypatch.setattr(manager, "config", replace(manager.config, refusal_proves_death=proves))
    server = serve()
    server.close()
    receiver = receiver_of(decode, server.bootstrap, next(ROOMS))
    wait_until(lambda: receiver.poll() is KVPoll.Failed)
    assert (server.ref in manager._resolver._dead) is proves
