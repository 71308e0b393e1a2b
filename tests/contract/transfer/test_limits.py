"""What a rank refuses for its own sake: while it drains, where a peer's frames are small, when a thread is stuck."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.errors import Reason
from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer import KVPoll
from kvgrpc.transfer.protocol.prefill.core import PrefillCore, PrefillRoom
from kvgrpc.transfer.runtime import decode_manager as decode_module
from kvgrpc.transfer.runtime import prefill_manager as prefill_module
from kvgrpc.transfer.runtime.death_proofs import MAX_LOOKUPS, NOTHING, DeathProofs
from tests.support.rank_host import PAGES, RankHost
from tests.support.transfer_peers import receiver_of, sender_of
from tests.support.waiting import wait_until


@pytest.fixture
def pair() -> Iterator[tuple[RankHost, RankHost]]:
    """A prefill whose frames are small, and a decode."""
    hosts = RankHost("P", "PREFILL", {"registry": "embedded", "max_frame_bytes": 65_536}), RankHost("D", "DECODE", {})
    yield hosts
    for host in hosts:
        host.close(1.0)


def received(pair: tuple[RankHost, RankHost], room: int) -> Any:
    prefill, decode = pair
    receiver = receiver_of(decode, f"{prefill.rank.address}/P", room)
    wait_until(lambda: receiver.poll() is not KVPoll.Bootstrapping)
    return receiver


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_rank_that_drains_takes_no_new_room(pair: tuple[RankHost, RankHost], role: str) -> None:
    prefill, decode = pair
    received(pair, 1).close()
    host = prefill if role == "prefill" else decode
    with SyncClient(host.rank.address) as client:
        assert client.drain(grace=5.0).drained
    handle = sender_of(prefill, 2) if role == "prefill" else receiver_of(decode, f"{prefill.rank.address}/P", 2)
    assert handle.poll() is KVPoll.Failed
    assert handle.failure.reason is Reason.SERVER_DRAINING
    assert handle.release_safe


def test_a_room_that_the_peers_frames_cannot_carry_fails_alone(pair: tuple[RankHost, RankHost]) -> None:
    prefill, decode = pair
    large, small = received(pair, 1), received(pair, 2)
    decode.rank.transfer.own_pages = (2**20,)  # a pool that is large enough for such a room
    large.init(list(range(0, 40_000, 2)), 0)
    small.init([1], 1)
    prefill.send(2, [PAGES - 1], aux_row=1)
    wait_until(lambda: small.poll() is KVPoll.Success)
    wait_until(lambda: large.failure is not None)
    assert large.failure.reason is Reason.FRAME_TOO_LARGE
    assert large.failure.metadata["limit"] == "65536"
    wait_until(lambda: large.release_safe)


def test_a_wait_that_never_returns_shows_in_the_ranks_health(
    pair: tuple[RankHost, RankHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_module, "_LONGEST_TURN_TICKS", 10)
    prefill, _ = pair
    receiver, sender, go_on = received(pair, 1), sender_of(prefill, 1), threading.Event()
    receiver.init([1], 0)
    sender.init(1, 0)
    sender.send([1], wait=go_on.wait)
    wait_until(lambda: not prefill.rank.healthy)
    go_on.set()
    wait_until(lambda: prefill.rank.healthy)
    wait_until(lambda: receiver.poll() is KVPoll.Success)


def test_an_engine_that_asks_faster_than_the_loop_works_is_refused_by_the_room(
    pair: tuple[RankHost, RankHost],
) -> None:
    prefill, _ = pair
    receiver, sender = received(pair, 1), sender_of(prefill, 1)
    receiver.init([1], 0)
    transfer = cast(Any, prefill.rank.transfer)
    stands, held = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        held.wait(20.0)

    transfer._loop.call_soon_threadsafe(stand)
    assert stands.wait(20.0)
    transfer._most_commands = 2
    sender.init(3, 0)
    for page in range(3):
        sender.send([page])
    waiting = len(transfer._commands)
    held.set()
    assert waiting <= 4, "two calls, and the failures of those that were refused"
    wait_until(lambda: sender.failure is not None and receiver.failure is not None)
    assert sender.failure.reason is Reason.TOO_MANY_REQUESTS
    assert sender.failure.retry_after == receiver.failure.retry_after == 1.0, "both sides know when to come again"


@pytest.mark.parametrize(
    ("owner", "name", "ends"),
    [
        (decode_module, "ReceiverRoom", "receiver"),
        (decode_module, "destination_of", "both"),
        (PrefillCore, "claim", "sender"),
        (PrefillRoom, "announce", "sender"),
        (prefill_module, "pages_of_pools", "both"),
        (PrefillCore, "on_outcome", "both"),
    ],
)
def test_memory_that_one_call_lacks_fails_its_room_at_once_and_no_other(
    pair: tuple[RankHost, RankHost],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    name: str,
    ends: str,
) -> None:
    """It fails on the loop, where the engine does not hear of it, and both ends waited for the room's deadline."""
    prefill, decode = pair

    def no_memory(*_: object) -> None:
        raise MemoryError

    handles: dict[str, Any] = {"receiver": received(pair, 1)} if ends == "both" else {}
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, SimpleNamespace(of=no_memory) if name == "ReceiverRoom" else no_memory)
        if ends == "receiver":
            handles[ends] = receiver_of(decode, f"{prefill.rank.address}/P", 1)
        if ends != "sender":
            handles["receiver"].init([1], 0)
        if ends != "receiver":
            sender = handles["sender"] = sender_of(prefill, 1)
            sender.init(1, 0)
            sender.send([1])
        for handle in handles.values():
            wait_until(lambda: handle.poll() is KVPoll.Failed)  # noqa: B023
            assert handle.failure.reason is Reason.INTERNAL
            causes = [record.getMessage() for record in caplog.records if record.exc_info]
            assert handle.failure.metadata["requestId"] in " ".join(causes), "nobody finds what happened"
            wait_until(lambda: handle.release_safe)  # noqa: B023
    assert prefill.rank.transfer.errors + decode.rank.transfer.errors == 1
    later = received(pair, 2)
    later.init([2], 1)
    prefill.send(2, [2], aux_row=1)
    wait_until(lambda: later.poll() is KVPoll.Success)


def test_an_abort_waits_for_an_aux_row_that_is_being_written(
    pair: tuple[RankHost, RankHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once abort returned the row is the engine's again, which gives it to another request."""
    prefill, decode = pair
    rows, begun, go_on = cast(Any, decode.rank.transfer).aux, threading.Event(), threading.Event()
    write = rows.write

    def slow_write(index: int, row: bytes) -> None:
        begun.set()
        go_on.wait(10.0)
        write(index, row)

    monkeypatch.setattr(rows, "write", slow_write)
    receiver = received(pair, 1)
    receiver.init([1], 3)
    prefill.send(1, [2], aux_row=5)
    assert begun.wait(10.0)
    aborting = threading.Thread(target=receiver.abort)
    aborting.start()
    aborting.join(0.2)
    assert aborting.is_alive()
    go_on.set()
    aborting.join(10.0)
    assert not aborting.is_alive()
    assert decode.aux_row(3) == prefill.aux_row(5)


class TestRefusedDials:
    """A proof (docs/session.md rule 4, proof of death): nobody listens at any address that the name has."""

    async def test_nobody_at_either_address_of_a_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert await self.refuses(monkeypatch, listening=False)

    async def test_somebody_at_the_second_address(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not await self.refuses(monkeypatch, listening=True)

    async def test_a_name_that_has_no_address_proves_nothing(self) -> None:
        refusals = DeathProofs()
        assert not await refusals.is_proof(REF, "no-such-host.invalid:1", was_welcomed=False)

    async def test_a_name_that_means_another_address_than_at_the_welcome_proves_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The address of a pod that was given away, a Service that has other endpoints."""
        for welcomed_at, proof in (("127.0.0.2", True), ("127.0.0.3", False), ("", False)):
            refusals = DeathProofs()
            refusals.welcomed(REF, frozenset({(welcomed_at, 9)}) if welcomed_at else NOTHING)
            monkeypatch.setattr(socket, "getaddrinfo", names("127.0.0.2", port=9))
            assert await refusals.is_proof(REF, "a.example:9", was_welcomed=True) is proof
            assert await refusals.is_proof(REF, "127.0.0.2:9", was_welcomed=True), "a number means itself"
            assert await refusals.is_proof(REF, "a.example:9", was_welcomed=False), "it was never told where to write"

    async def test_where_others_may_refuse_in_its_place_no_refusal_is_proof(self) -> None:
        assert not await DeathProofs(prove=False).is_proof(REF, "127.0.0.2:9", was_welcomed=True)
        assert await DeathProofs(prove=False).is_proof(REF, "127.0.0.2:9", was_welcomed=False)

    async def test_a_resolver_that_hangs_holds_up_no_other_work_and_proves_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Checksums are compared, and what blocks is closed, on the threads that every part of a process shares."""
        refusals, answered, running = DeathProofs(), threading.Event(), asyncio.get_running_loop()
        with monkeypatch.context() as patched:
            patched.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(30.0) and [])
            began = time.monotonic()
            lookups = [asyncio.ensure_future(refusals.behind(f"p{index}.example:9")) for index in range(100)]
            for _ in range(5):  # until they have begun
                await asyncio.sleep(0)
            try:
                assert await asyncio.wait_for(running.run_in_executor(None, lambda: "compared"), 10.0) == "compared"
                assert await refusals.is_proof(REF, "127.0.0.2:9", was_welcomed=True), "a number needs no resolver"
                assert not any(lookup.done() for lookup in lookups), "they went on beside the lookups"
                assert set(await asyncio.gather(*lookups)) == {NOTHING}
                assert time.monotonic() - began < 10.0
                assert not await refusals.is_proof(REF, "p0.example:9", was_welcomed=False)
                assert refusals._lookups._places.count == MAX_LOOKUPS  # those that hang, and none that gave up
            finally:
                answered.set()
        with monkeypatch.context() as patched:
            patched.setattr(socket, "getaddrinfo", names("127.0.0.2", port=9))
            assert await refusals.behind("p0.example:9") == {("127.0.0.2", 9)}, "once it answers again"
        refusals.close()
        assert await refusals.behind("p0.example:9") == NOTHING

    async def test_of_peers_that_are_forgotten_nothing_is_kept(self) -> None:
        refusals = DeathProofs()
        refusals.welcomed(REF, frozenset({("127.0.0.2", 9)}))
        refusals.forget_all_but(())
        assert not refusals._welcomed

    async def refuses(self, monkeypatch: pytest.MonkeyPatch, listening: bool) -> bool:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.2", 0)
        port = server.sockets[0].getsockname()[1]
        if not listening:
            server.close()
            await server.wait_closed()
        monkeypatch.setattr(socket, "getaddrinfo", names("127.0.0.1", "127.0.0.2", port=port))
        began = time.monotonic()
        refusals, address = DeathProofs(), f"two.example:{port}"
        refusals.welcomed(REF, await refusals.behind(address))
        try:
            return await refusals.is_proof(REF, address, was_welcomed=True)
        finally:
            assert time.monotonic() - began < 5.0
            server.close()


REF = RankRef(RankId("P"), 1)


def names(*addresses: str, port: int) -> Any:
    """A resolver to which every name means these."""

    return lambda *_, **__: [(2, 1, 6, "", (address, port)) for address in addresses]
