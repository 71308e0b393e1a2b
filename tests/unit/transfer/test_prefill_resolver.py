"""PrefillResolver between two answers of a registry: what was known of an engine, while somebody asks for it anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.errors import Failure, PeerUnreachable, Reason
from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.transfer.layout.topology import Shape
from kvgrpc.transfer.protocol.decode.core import DecodeCore
from kvgrpc.transfer.protocol.types import Handle, RoomKey, Target
from kvgrpc.transfer.runtime import resolve
from kvgrpc.transfer.runtime.boundary import RoomRequest
from kvgrpc.transfer.runtime.resolve import PrefillEngine, PrefillResolver, ReceiverRoom
from kvgrpc.v1 import transfer_service_pb2 as pb

REGISTRY = "registry:8998"
RANKS = {
    (dp, 0, 0, tp): Target(RankRef(RankId("P", dp, 0, 0, tp), 1), f"p{dp}{tp}:1") for dp in (0, 1) for tp in (0, 1)
}
ENGINE = PrefillEngine("P", Layout(dp=2, tp=2), RANKS, engine_selects_dp=True)


class Decode:
    """A decode rank of one, to which two tensor-parallel ranks of prefill owe a part each. The registry answers once,
    and then never; the ranks of dp 1 answer ``rooms`` once it is set."""

    def __init__(self) -> None:
        self.registry_answers = True
        self.asked_at_once = 0
        self.now: PrefillEngine | None = None
        self.rooms: asyncio.Future[list[RoomKey]] = asyncio.get_running_loop().create_future()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.core = DecodeCore(RankRef(RankId("D"), 1))
        shape = Shape(RankId("D"), Layout(), (), (), "fake")
        self.routes = PrefillResolver(
            self.core, shape, self._resolve, self._channel, self._start, lambda: None, nothing_changes
        )

    def room(self, number: int) -> ReceiverRoom:
        room = ReceiverRoom.of(Handle(), RoomRequest(RoomKey(number), REGISTRY, None, ""))
        assert self.core.open(room)
        return room

    async def _resolve(self, bootstrap_addr: str, decode: RankId, at_once: bool = False) -> PrefillEngine:
        if at_once:
            self.asked_at_once += 1
            if self.now is None:
                raise PeerUnreachable("the registry died with it")
            return self.now
        if not self.registry_answers:
            await asyncio.Event().wait()
        return ENGINE

    def _start(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = self.tasks[name] = asyncio.get_running_loop().create_task(work, name=name)
        return task

    def _channel(self, address: str) -> Any:
        return Channel(self, address)

    async def close(self) -> None:
        await self.routes.close()
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def nothing_changes(bootstrap_addr: str, since: int, timeout: float) -> int:
    """The registry says of its engines what it said."""
    await asyncio.Event().wait()
    return since


class Channel:
    """What a stub of TransferService calls."""

    def __init__(self, decode: Decode, address: str) -> None:
        self._decode, self._address = decode, address

    def unary_unary(self, path: str, **_: Any) -> Any:
        return self._locate

    stream_stream = unary_stream = unary_unary

    async def _locate(self, request: pb.LocateRoomsRequest, timeout: float) -> pb.LocateRoomsResponse:
        if not self._address.startswith("p1"):
            await asyncio.Event().wait()
        found = await asyncio.shield(self._decode.rooms)
        return pb.LocateRoomsResponse(rooms=[pb.RoomKey(room=key.room, attempt=key.attempt) for key in found])

    async def close(self) -> None: ...


@pytest.fixture
async def decode() -> AsyncIterator[Decode]:
    made = Decode()
    yield made
    await made.close()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def looked_for(decode: Decode) -> tuple[ReceiverRoom, ReceiverRoom]:
    """Two rooms, the second of which the ranks are asked for; then the registry has nothing to say for a while."""
    first, second = decode.room(1), decode.room(2)
    decode.routes.find(second)
    await settle()
    decode.registry_answers = False
    return first, second


async def test_a_room_that_is_found_while_its_engine_is_asked_for_anew_gets_all_its_parts(decode: Decode) -> None:
    """It was bound to one of the two ranks that owe it a part, and said Success without the bytes of the other."""
    first, second = await looked_for(decode)
    decode.routes.find_anew(first)
    decode.rooms.set_result([second.key])
    await settle()
    assert {part.pair.ref for part in second.parts} == {RANKS[1, 0, 0, tp].ref for tp in (0, 1)}


async def test_one_whose_engine_was_forgotten_meanwhile_is_resolved_anew(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = await looked_for(decode)
    monkeypatch.setattr(resolve, "KNOWN_ENGINES", 0)
    decode.routes._remember("another:8998", ENGINE)
    decode.routes._remember("third:8998", ENGINE)
    decode.rooms.set_result([second.key])
    await settle()
    assert not second.parts
    assert f"resolve {REGISTRY}" in {name for name, task in decode.tasks.items() if not task.done()}


async def test_while_an_engine_is_asked_for_anew_its_other_lost_ranks_are_waited_for(decode: Decode) -> None:
    """A prefill that was killed whole came back, and its first room paid for the dial (rule 3, break and loss)."""
    first, _ = await looked_for(decode)
    decode.routes.find_anew(first)
    decode.routes.await_restart(RANKS[0, 0, 0, 1].ref)
    assert f"await {RANKS[0, 0, 0, 1].ref.rank}" in decode.tasks


async def test_new_rooms_do_not_trust_what_is_asked_for_anew(decode: Decode) -> None:
    first, _ = await looked_for(decode)
    decode.routes.find_anew(first)
    third = decode.room(3)
    decode.rooms.set_result([third.key])
    decode.routes.find(third)
    await settle()
    assert not third.parts and not decode.routes.stands(third.request)


async def test_a_room_that_ends_while_it_is_looked_for_is_told_to_every_rank_that_may_have_a_sender(
    decode: Decode,
) -> None:
    """Of each dp rank the first part heard of it; the senders of the others waited for their own deadline."""
    _, second = await looked_for(decode)
    decode.core.fail(second, Failure(Reason.ROOM_CANCELLED, "no"))
    decode.rooms.set_result([])
    await settle()
    assert {pair.ref for pair in decode.core.pairs.values() if second.key in pair.refusals} == {
        target.ref for target in RANKS.values()
    }


def chosen(decode: Decode, number: int) -> ReceiverRoom:
    """A room whose dp rank a router chose."""
    room = ReceiverRoom.of(Handle(), RoomRequest(RoomKey(number), REGISTRY, 1, ""))
    assert decode.core.open(room)
    return room


@pytest.mark.parametrize("registered", ["nobody answers", "the dead one", "it is missing", "another is missing"])
async def test_a_room_whose_prefill_is_dead_fails_at_once_while_nobody_is_in_its_place(
    decode: Decode, registered: str
) -> None:
    """Each asked a refused address for 30 s."""
    decode.routes.find(chosen(decode, 1))
    await settle()
    dead = RANKS[1, 0, 0, 1].ref
    decode.routes.note_death(dead)
    decode.core.pairs[dead].lost = True
    decode.registry_answers = False
    ranks = {place: target for place, target in RANKS.items() if target.ref != dead}
    others = {place: target for place, target in RANKS.items() if target.ref == dead}
    decode.now = {
        "nobody answers": None,
        "the dead one": ENGINE,
        "it is missing": replace(ENGINE, targets=ranks, owing={}),
        "another is missing": replace(ENGINE, targets=others, owing={}),  # the registry has just started
    }[registered]
    room = chosen(decode, 2)
    decode.routes.find(room)
    await settle()
    assert decode.asked_at_once == 1 and room.failure is not None
    assert room.failure.reason is Reason.PEER_LOST
    assert set(decode.routes._engines[REGISTRY].targets) == set(RANKS), "who is missing is looked for on"


async def test_a_room_whose_prefill_is_dead_goes_to_its_successor_once_the_registry_names_it(decode: Decode) -> None:
    decode.routes.find(chosen(decode, 1))
    await settle()
    for tp in (0, 1):
        decode.routes.note_death(RANKS[1, 0, 0, tp].ref)
        decode.core.pairs[RANKS[1, 0, 0, tp].ref].lost = True
    again = {place: Target(RankRef(target.ref.rank, 2), target.address) for place, target in RANKS.items()}
    decode.now = replace(ENGINE, targets=again, owing={})
    room = chosen(decode, 2)
    decode.routes.find(room)
    await settle()
    assert room.failure is None and {part.pair.ref.epoch for part in room.parts} == {2}
    third = chosen(decode, 3)
    decode.routes.find(third)
    await settle()
    assert decode.asked_at_once == 1 and third.failure is None, "the dead are not asked for again"


async def test_one_that_came_back_with_fewer_ranks_is_known_from_then_on(decode: Decode) -> None:
    """Each later room asked the registry for it, for as long as decode lived."""
    decode.routes.find(chosen(decode, 1))
    await settle()
    for tp in (0, 1):
        decode.routes.note_death(RANKS[1, 0, 0, tp].ref)
        decode.core.pairs[RANKS[1, 0, 0, tp].ref].lost = True
    fewer = {(dp, 0, 0, 0): Target(RankRef(RankId("P", dp), 2), f"p{dp}0:1") for dp in (0, 1)}
    decode.now = replace(ENGINE, layout=Layout(dp=2), targets=fewer, owing={})
    for number in (2, 3):
        room = chosen(decode, number)
        decode.routes.find(room)
        await settle()
        assert room.failure is None and {part.pair.ref.epoch for part in room.parts} == {2}
    assert decode.asked_at_once == 1


async def test_the_dead_are_remembered_up_to_a_bound(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "KNOWN_DEAD", 2)
    for epoch in (1, 2, 3):
        decode.routes.note_death(RankRef(RankId("P"), epoch))
    assert [ref.epoch for ref in decode.routes._dead] == [2, 3]


async def test_one_that_its_registry_names_long_after_it_refused_is_dialled_again(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy may have refused in its place; it got no room for as long as it lived."""
    monkeypatch.setattr(resolve, "_DEATH_STANDS_SECONDS", -1.0)
    alive = RANKS[1, 0, 0, 1].ref
    decode.routes.find(chosen(decode, 1))
    await settle()
    decode.routes.note_death(alive)
    decode.core._drop_pair(decode.core.pairs[alive])
    decode.now = ENGINE
    room = chosen(decode, 2)
    decode.routes.find(room)
    await settle()
    assert room.failure is None and alive in {part.pair.ref for part in room.parts}
    assert alive not in decode.routes._dead


async def test_a_room_of_a_known_engine_whose_sessions_stand_is_bound_without_a_question(decode: Decode) -> None:
    """Its first room asked the registry; what it said holds while a session to each rank does."""
    engine = replace(ENGINE, engine_selects_dp=False)
    decode.routes._remember(REGISTRY, engine)
    for target in RANKS.values():
        decode.core.predial(target)
    room = decode.room(2)
    decode.routes.find(room)
    assert room.bound and {part.pair.ref for part in room.parts} == {RANKS[0, 0, 0, tp].ref for tp in (0, 1)}
    assert not decode.tasks


async def test_a_room_of_a_known_engine_that_chooses_dp_is_looked_for_without_a_question(decode: Decode) -> None:
    decode.routes._remember(REGISTRY, ENGINE)
    room = decode.room(2)
    decode.routes.find(room)
    decode.rooms.set_result([room.key])
    await settle()
    assert room.bound and {part.pair.ref for part in room.parts} == {RANKS[1, 0, 0, tp].ref for tp in (0, 1)}
    assert f"resolve {REGISTRY}" not in decode.tasks


async def test_a_dp_rank_that_a_known_engine_has_not_is_asked_for_anew(decode: Decode) -> None:
    """It may have grown since; where it has not, the room fails with what is wrong."""
    decode.routes._remember(REGISTRY, ENGINE)
    room = ReceiverRoom.of(Handle(), RoomRequest(RoomKey(2), REGISTRY, 7, ""))
    assert decode.core.open(room)
    decode.routes.find(room)
    assert room.failure is None
    await settle()
    assert f"resolve {REGISTRY}" in decode.tasks and room.failure is not None
    assert room.failure.reason is Reason.PARALLEL_LAYOUT_MISMATCH and "prefill_dp_rank" in room.failure.message
