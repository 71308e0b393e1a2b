"""Opening and closing a rank: what it stands on is opened with typed errors, and given back in the right order."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import mmap
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvgrpc.dataplane
from kvgrpc.dataplane.shm.plane import ShmDataPlane
from kvgrpc.errors import AddressNotAllowed, InvalidRequest, Reason, ServerDraining, StaleEpoch
from kvgrpc.events import KVEventBatch
from kvgrpc.model import Pool, PoolKind, Region, Role
from kvgrpc.rpc.status import error_from
from kvgrpc.server import CallLimits, Rank, open_decode, open_prefill, open_rank
from kvgrpc.server.rank import opening
from kvgrpc.server.rank import rank as opened
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender
from kvgrpc.transfer.protocol.types import Bounds
from kvgrpc.transfer.runtime.prefill_manager import PrefillManager
from kvgrpc.v1 import server_service_pb2 as server_pb
from kvgrpc.v1 import transfer_service_pb2 as transfer_pb
from kvgrpc.v1.server_service_pb2_grpc import ServerServiceStub
from kvgrpc.v1.transfer_service_pb2_grpc import TransferServiceStub
from tests.support.small_rank import PAGE_BYTES, PAGES, small_rank


@pytest.fixture
def plane() -> Iterator[Any]:
    plane = kvgrpc.dataplane.open_plane("shm")
    yield plane
    plane.close(1.0)


class TestWhatARankStandsOn:
    def test_an_events_endpoint_that_is_taken_is_named(self, plane: Any) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(AddressNotAllowed) as refused:
                open_rank(small_rank(plane, events={"endpoint": endpoint, "bind": True}))
        assert refused.value.metadata == {"address": endpoint, "configKey": "events"}

    @pytest.mark.parametrize("events", [{"publisher": "pigeon"}, {"endpoint": "nowhere"}])
    def test_events_that_cannot_be_are_named(self, plane: Any, events: dict[str, str]) -> None:
        with pytest.raises(InvalidRequest) as refused:
            open_rank(small_rank(plane, events=events))
        assert refused.value.metadata["field"] == "events"
        assert refused.value.metadata["rule"] and next(iter(events.values())) in refused.value.metadata["value"]

    def test_the_data_plane_is_told_the_whole_of_an_ipv6_address(
        self, plane: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Mooncake itself would turn this whole process, and those that later tests start from it, to IPv6.
        hosts: list[str] = []

        def opened(name: str, host: str, device: str) -> Any:
            hosts.append(host)
            return plane

        monkeypatch.setattr(opening, "open_plane", opened)
        for settings in ({"advertise": "fd00::5"}, {"advertise": "[fd00::5]:9001"}, {"listen": "[fd00::5]:0"}):
            opening.plane_of(replace(small_rank(plane, **settings), data_plane="mooncake"))
        assert hosts == ["fd00::5"] * 3

    def test_memory_that_the_plane_cannot_move_is_named_and_a_plane_of_ours_closed(
        self, plane: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed: list[Any] = []
        close = ShmDataPlane.close

        def close_and_tell(self: ShmDataPlane, deadline: float) -> bool:
            closed.append(self)
            return close(self, deadline)

        monkeypatch.setattr(ShmDataPlane, "close", close_and_tell)
        memory = ctypes.create_string_buffer(2 * PAGE_BYTES)
        pool = Pool("kv", PoolKind.KV, 16, 1, "x", (Region(0, "kv", ctypes.addressof(memory), PAGE_BYTES, PAGE_BYTES),))
        with pytest.raises(InvalidRequest) as refused:
            open_rank(small_rank(plane, pools=(pool,), data_plane="shm"))
        assert refused.value.metadata["field"] == "pools" and refused.value.metadata["rule"]
        assert len(closed) == 1

    def test_an_epoch_that_never_fits_gives_a_plane_of_ours_back(
        self, plane: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed: list[Any] = []
        tried: list[int] = []

        async def refused_as_old(rank: Rank[Any], deadline: float) -> None:
            tried.append(rank.ref.epoch)
            raise StaleEpoch("older than what is here", metadata={"currentEpoch": rank.ref.epoch + 7})

        monkeypatch.setattr(ShmDataPlane, "register", lambda self, ranges: None)

        def close_and_tell(self: ShmDataPlane, deadline: float) -> bool:
            closed.append(self)
            return True

        monkeypatch.setattr(ShmDataPlane, "close", close_and_tell)
        monkeypatch.setattr(Rank, "_open", refused_as_old)
        with pytest.raises(StaleEpoch):
            open_rank(small_rank(plane, data_plane="shm"))
        assert tried == [tried[0], tried[0] + 8, tried[0] + 16]
        assert len(closed) == 1


def test_a_rank_tells_its_settings_its_registry_and_that_nothing_protects_it(plane: Any) -> None:
    rank = open_rank(small_rank(plane, registry="embedded", lease_ttl=2.0))
    with grpc.insecure_channel(rank.address) as channel:
        info = ServerServiceStub(channel).GetServerInfo(server_pb.GetServerInfoRequest(), timeout=5)
    rank.close(2.0)
    told = {each.name: each.value for each in info.settings}
    assert (told["registry"], told["lease_ttl"], told["token"]) == ("embedded", "2.0", "")
    assert info.registration.address == rank.address
    assert info.registration.state == server_pb.REGISTRATION_STATE_REGISTERED
    assert not info.registration.HasField("away_since")
    assert info.security == server_pb.PortSecurity()
    assert info.versions["grpcio"] == grpc.__version__


def test_the_limits_that_a_rank_tells_are_those_that_it_keeps(plane: Any) -> None:
    bounds, calls = Bounds(rooms=77, chunks_per_room=5), CallLimits(watches_per_caller=3)
    rank = open_rank(
        small_rank(plane, registry="embedded", lease_ttl=2.0, bounds=bounds, max_frame_bytes=70_000, call_limits=calls)
    )
    with grpc.insecure_channel(rank.address) as channel:
        info = ServerServiceStub(channel).GetServerInfo(server_pb.GetServerInfoRequest(), timeout=5)
    assert info.limits == server_pb.ServerLimits(
        calls=server_pb.CallLimits(
            unary=4_096,
            streams=16_384,
            watches_per_caller=3,
            health_watches_per_caller=16,
            reflections_per_caller=16,
            locates_per_caller=1_024,
            keepalives_per_caller=1_024,
        ),
        rank=server_pb.RankLimits(
            max_frame_bytes=70_000,
            max_rooms=77,
            max_unclaimed_per_session=4_096,
            max_unclaimed=65_536,
            max_ended_records=65_536,
            max_known_streams=65_536,
            max_held_pages=PAGES // 4,
            max_chunks_per_room=5,
            max_aux_bytes=65_536,
            max_unknown_writes=16,
        ),
        registry=server_pb.RegistryLimits(
            max_page_size=1_000,
            max_rows_per_request=1_024,
            max_leases_per_request=65_536,
            lease_ttl=duration_pb2.Duration(seconds=2),
        ),
    )
    rank.close(1.0)


@pytest.mark.parametrize(("role", "registry"), [(Role.PREFILL, "embedded"), (Role.DECODE, "")])
def test_a_rank_logs_where_it_is_found(plane: Any, caplog: pytest.LogCaptureFixture, role: Role, registry: str) -> None:
    caplog.set_level("INFO")
    rank = open_rank(small_rank(plane, role=role, registry=registry))
    where = f"rank {rank.ref} listens on {rank.address}, registry {registry or 'none'}, data plane shm"
    assert [record.levelname for record in caplog.records if where in record.message] == ["INFO"]
    assert role.name.lower() in caplog.text
    rank.close(1.0)


class Lingering(ShmDataPlane):
    """A plane that cannot say that no write is left, until ``gone``; it takes all the time that it gets for that."""

    gone = False

    def close(self, deadline: float) -> bool:
        if not self.gone:
            time.sleep(deadline)  # the slow plane itself
        return self.gone and super().close(deadline)


class OfTheEngine:
    """Memory that no data plane gave."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, PAGES * PAGE_BYTES)

    def allocate(self, nbytes: int) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


@pytest.fixture
def lingering(monkeypatch: pytest.MonkeyPatch) -> Lingering:
    """Opened by the next rank, whose own it is."""
    plane = Lingering()
    monkeypatch.setattr(plane, "register", lambda ranges: None)
    monkeypatch.setattr(opening, "open_plane", lambda name, host, device: plane)
    return plane


class TestClosing:
    def test_memory_of_the_callers_own_plane_stays_and_is_opened_again(self, plane: Any) -> None:
        settings = small_rank(plane, registry="embedded")
        address = settings.pools[0].regions[0].address
        memory = (ctypes.c_uint8 * PAGES * PAGE_BYTES).from_address(address)
        for _ in range(2):
            rank = open_rank(settings)
            ctypes.memset(memory, 7, PAGES * PAGE_BYTES)
            closed = rank.close(2.0)
            assert closed.drained and not closed.listening
            assert not connects(rank.address)
            assert bytes(memory) == b"\x07" * (PAGES * PAGE_BYTES)
        assert plane.close(1.0)

    def test_a_write_that_was_lost_track_of_is_over_once_the_caller_has_closed_its_plane(
        self, plane: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Peers hold its pages until a dial is refused: the address must not stay for ever."""
        rank = open_rank(small_rank(plane))
        monkeypatch.setattr(PrefillManager, "has_unknown_writes", True)
        assert rank.close(1.0).listening and connects(rank.address)
        assert rank.close(1.0).listening, "a later look alone changes nothing"
        assert plane.close(1.0)
        assert not rank.close(1.0).listening and not connects(rank.address)

    def test_a_plane_that_the_caller_closed_first_has_no_write_left(
        self, plane: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rank = open_rank(small_rank(plane))
        told: list[bool] = []
        monkeypatch.setattr(PrefillManager, "has_unknown_writes", True)
        monkeypatch.setattr(rank.transfer, "on_plane_closed", lambda: told.append(True))
        assert plane.close(1.0)
        assert not rank.close(1.0).listening and told == [True]

    @pytest.mark.parametrize("deadline", [math.nan, math.inf, 1e308])
    def test_a_deadline_that_never_comes_is_refused_and_nothing_is_closed(self, plane: Any, deadline: float) -> None:
        rank = open_rank(small_rank(plane))
        with pytest.raises(InvalidRequest) as refused:
            rank.close(deadline)
        assert refused.value.metadata["field"] == "deadline" and connects(rank.address)
        assert not rank.close(-1.0).listening, "time that is over is no reason to leave a rank open"

    def test_the_address_outlives_every_write(self, lingering: Lingering, caplog: pytest.LogCaptureFixture) -> None:
        plane = lingering
        rank = open_rank(replace(small_rank(OfTheEngine()), data_plane="shm"))
        closed = rank.close(1.0)
        assert (closed.drained, closed.listening) == (False, True)
        assert "stays bound" in caplog.text
        assert connects(rank.address), "a refused dial would prove that nobody writes any more"
        with grpc.insecure_channel(rank.address) as channel:
            transfer = TransferServiceStub(channel)
            for call in (
                lambda: transfer.ListRooms(transfer_pb.ListRoomsRequest(), timeout=5),
                lambda: next(transfer.Session(iter([transfer_pb.SessionRequest()]), timeout=5)),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                assert isinstance(error_from(refused.value), ServerDraining)
            info = ServerServiceStub(channel).GetServerInfo(server_pb.GetServerInfoRequest(), timeout=5)
            assert info.draining
        plane.gone = True
        assert not rank.close(1.0).listening
        assert not connects(rank.address)

    def test_a_plane_that_raises_on_close_has_not_said_that_no_write_is_left(
        self, lingering: Lingering, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rank = open_rank(replace(small_rank(OfTheEngine()), data_plane="shm"))

        def raises(deadline: float) -> bool:
            raise OSError("a driver")

        with monkeypatch.context() as broken:
            broken.setattr(lingering, "close", raises)
            assert rank.close(1.0).listening and connects(rank.address)
        lingering.gone = True
        assert not rank.close(1.0).listening

    def test_all_steps_share_one_end(self, lingering: Lingering, monkeypatch: pytest.MonkeyPatch) -> None:
        rank = open_rank(replace(small_rank(OfTheEngine()), data_plane="shm"))
        worker_of = rank.transfer.close_worker

        async def as_long_as_it_may(grace: float) -> tuple[bool, int]:
            await asyncio.sleep(2 * grace)  # the slow drain itself
            return False, 1

        def ends_late(deadline: float) -> bool:
            time.sleep(deadline)  # the slow worker itself
            return bool(worker_of(deadline))

        monkeypatch.setattr(rank.transfer, "drain", as_long_as_it_may)
        monkeypatch.setattr(rank.transfer, "close_worker", ends_late)
        began = time.monotonic()
        assert rank.close(3.0).listening
        assert time.monotonic() - began < 5.8  # one end for each step would be twice the time

    def test_a_drain_takes_its_grace_and_not_twice(self, monkeypatch: pytest.MonkeyPatch, plane: Any) -> None:
        rank = open_rank(small_rank(plane))

        async def as_long_as_it_may(grace: float) -> tuple[bool, int]:
            await asyncio.sleep(2 * grace)  # the slow drain itself
            return False, 1

        monkeypatch.setattr(opened, "_CANCELLED_WRITES_SECONDS", 0.1)
        monkeypatch.setattr(rank.transfer, "drain", as_long_as_it_may)
        began = time.monotonic()
        assert rank._loop.run(rank.drain(2.0), 10.0) == (False, 0)
        assert time.monotonic() - began < 3.9
        monkeypatch.undo()
        assert rank.close(1.0).drained


def connects(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_the_switch_interval_is_the_processs_and_only_where_it_is_asked_for(plane: Any) -> None:
    before = sys.getswitchinterval()
    try:
        with open_rank(small_rank(plane)):
            assert sys.getswitchinterval() == before
        with open_rank(small_rank(plane, switch_interval=0.000_5)):
            assert sys.getswitchinterval() == pytest.approx(0.000_5)
    finally:
        sys.setswitchinterval(before)


class TestRoles:
    """mypy reads this file: ``rank.transfer`` has the type of its role."""

    def test_the_transfer_of_a_rank_is_typed_by_its_role(self, plane: Any) -> None:
        with (
            open_prefill(small_rank(plane)) as prefill,
            open_decode(small_rank(plane, engine="D", role=Role.DECODE)) as decode,
        ):
            assert not KVSender(prefill.transfer, "", 1).ended
            assert not KVReceiver(decode.transfer, "127.0.0.1:1", 1).ended
            assert f"{prefill.ref} prefill at {prefill.address} over shm: healthy" in repr(prefill)
        assert "closed" in repr(prefill)

    def test_another_role_is_refused_before_anything_is_opened(self, plane: Any) -> None:
        for open_one, role in ((open_prefill, Role.DECODE), (open_decode, Role.PREFILL)):
            with pytest.raises(InvalidRequest) as refused:
                open_one(small_rank(plane, role=role))
            assert (refused.value.metadata["field"], refused.value.metadata["value"]) == ("role", repr(role.name))

    def test_a_handle_of_the_other_role_fails_with_its_reason_and_raises_nothing(self, plane: Any) -> None:
        with (
            open_rank(small_rank(plane)) as prefill,
            open_rank(small_rank(plane, engine="D", role=Role.DECODE)) as decode,
        ):
            receiver, sender = KVReceiver(prefill.transfer, "127.0.0.1:1", 1), KVSender(decode.transfer, "", 1)
            receiver.init([1])
            sender.init(1)
            sender.send([1])
            for handle in (receiver, sender):
                assert handle.poll() is KVPoll.Failed and handle.release_safe
                assert handle.failure is not None and handle.failure.reason is Reason.WRONG_RANK
                handle.abort()
                handle.close()
            assert receiver.failure is not None
            assert receiver.failure.metadata == {"expected": "DECODE", "actual": "PREFILL"}
            assert prefill.healthy and decode.healthy


def test_a_rank_that_was_replaced_publishes_no_more_and_its_event_service_says_so(plane: Any) -> None:
    """Two streams of one cache would be two truths."""
    events = {"endpoint": "tcp://127.0.0.1:0"}
    with contextlib.ExitStack() as opened:

        def rank(**changes: Any) -> Rank[Any]:
            own = kvgrpc.dataplane.open_plane("shm")
            opened.callback(own.close, 1.0)
            made = open_rank(small_rank(own, **changes))
            opened.callback(made.close, 1.0)
            return made

        registry = rank(engine="R", registry="embedded", lease_ttl=1.0).address
        old = rank(registry=registry, events=events)
        assert old.events.publish(KVEventBatch(0.0, []))
        new = rank(registry=registry, events=events)
        deadline = time.monotonic() + 20
        while old.events.publish(KVEventBatch(0.0, [])):
            assert time.monotonic() < deadline, "the replaced rank goes on"
            time.sleep(0.01)
        assert new.events.publish(KVEventBatch(0.0, []))
        with grpc.insecure_channel(old.address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest(service="kvgrpc.v1.EventService")
            while health.Check(asked).status != health_pb2.HealthCheckResponse.NOT_SERVING:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert all(old._live().values()), "a restart would mend nothing"
