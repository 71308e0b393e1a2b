"""Peers of a rank that tests steer message by message: a decode that dials it, and a prefill that it dials."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, cast

import grpc
import numpy as np
import pytest

import kvgrpc.dataplane
from kvgrpc.errors import Failure
from kvgrpc.model import Layout, Pool, PoolKind, RankId, RankRef, Region, new_epoch
from kvgrpc.net import target_of
from kvgrpc.rpc.credentials.tokens import authorization
from kvgrpc.transfer import KVReceiver, KVSender
from kvgrpc.transfer.protocol.types import RoomKey
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import registry_service_pb2 as registry_pb
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from kvgrpc.wire import failure_from_pb, layout_to_pb, pool_to_pb, rank_ref_to_pb
from tests.support.rank_host import AUX_BYTES, LAYERS, PAGE_BYTES, PAGES, RankHost
from tests.support.waiting import wait_until

SECONDS = 15.0
METHOD = "/kvgrpc.v1.TransferService/Session"
ANNOUNCE = pb.WANT_ANNOUNCE
WRITE, STOP, FORGET = pb.WANT_WRITE, pb.WANT_STOP, pb.WANT_FORGET
BOOTSTRAPPING, FAILED, SUCCESS = pb.ROOM_STATE_BOOTSTRAPPING, pb.ROOM_STATE_FAILED, pb.ROOM_STATE_SUCCESS
OPEN, STOPPED, SETTLED = pb.WRITES_OPEN, pb.WRITES_STOPPED, pb.WRITES_SETTLED
UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))


class Closable(Protocol):
    def close(self) -> object: ...


Made = TypeVar("Made", bound=Closable)


class Memory:
    """What a decode client offers: one pool of real shared memory, laid out as RankHost's."""

    def __init__(self) -> None:
        self.plane: Any = kvgrpc.dataplane.open_plane("shm")
        address = self.plane.allocate(LAYERS * PAGES * PAGE_BYTES)
        regions = tuple(
            Region(layer, "kv", address + layer * PAGES * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES) for layer in range(LAYERS)
        )
        self.pool = Pool("kv", PoolKind.KV, 16, PAGES, "float32", regions)
        size = LAYERS * PAGES * PAGE_BYTES
        view = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        self.bytes = view.reshape(LAYERS, PAGES, PAGE_BYTES)


class DecodeClient:
    """One stream of a decode rank that is not there: what is sent is up to the test; what comes is kept in order."""

    numbers = itertools.count(1)

    def __init__(self, host: Any, memory: Memory, engine: str = "", **hello: Any) -> None:
        self.memory = memory
        self.ref = RankRef(RankId(engine or f"C{next(self.numbers)}"), new_epoch())
        self.to: RankRef = host.rank.ref
        self.address: str = host.rank.address
        self._channel = grpc.insecure_channel(self.address, options=UNLIMITED)
        self._requests: queue.SimpleQueue[pb.SessionRequest | bytes | None] = queue.SimpleQueue()
        self._responses: queue.SimpleQueue[pb.SessionResponse | None] = queue.SimpleQueue()
        self.kept: list[pb.SessionResponse] = []
        self.error: grpc.RpcError | None = None
        self.secret = self.header = ""
        self._call: Any = None

    def hello(self, **changes: Any) -> pb.Hello:
        hello = pb.Hello(
            to=rank_ref_to_pb(self.to),
            stream=1,
            layout=layout_to_pb(Layout()),
            pools=[pool_to_pb(self.memory.pool)],
            aux_item_bytes=[AUX_BYTES],
            data_plane="shm",
            data_plane_address=self.memory.plane.address(),
            expected=pb.CachePart(layer_start=0, layer_count=LAYERS, aux=True),
        )
        hello.opener.CopyFrom(rank_ref_to_pb(self.ref))
        for field, value in changes.items():
            hello.ClearField(field)  # type: ignore[arg-type]
            hello.MergeFrom(pb.Hello(**{field: value}))
        return hello

    def dial(self, *, read: bool = True) -> DecodeClient:
        """Opens the stream and says nothing. Without ``read`` nothing is taken off it either."""
        method = self._channel.stream_stream(
            METHOD,
            request_serializer=lambda each: each if isinstance(each, bytes) else each.SerializeToString(),
            response_deserializer=pb.SessionResponse.FromString,
        )
        requests: Iterator[Any] = iter(self._requests.get, None)
        header = self.header
        if self.secret:
            header = authorization(self.secret, target_of(self.address), int(time.time()))
        metadata = (("authorization", header),) if header else ()
        self._call = method(requests, metadata=metadata)
        if read:
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def open(self, **changes: Any) -> DecodeClient:
        """Dials, says hello, and hears Welcome."""
        self.dial().send(hello=self.hello(**changes))
        first = self.read()
        assert first.HasField("welcome"), first
        return self

    def again(self, stream: int, **changes: Any) -> DecodeClient:
        """Another stream of the same incarnation."""
        other = DecodeClient.__new__(DecodeClient)
        other.__dict__.update(self.__dict__)
        other._requests, other._responses, other.kept = queue.SimpleQueue(), queue.SimpleQueue(), []
        return other.open(stream=stream, **changes)

    def refused(self, **changes: Any) -> Failure:
        """What the Goodbye to such a hello says."""
        return self.dial().send(hello=self.hello(**changes)).goodbye()

    def send(self, **fields: Any) -> DecodeClient:
        self._requests.put(pb.SessionRequest(**fields))
        return self

    def send_raw(self, raw: bytes) -> DecodeClient:
        self._requests.put(raw)
        return self

    def write(self, room: int, pages: Sequence[int], **fields: Any) -> DecodeClient:
        sets = [common_pb2.PageSet(pages_u32_le=np.array(pages, "<u4").tobytes())]
        return self.send(rooms=[pb.DecodeRoom(room=room, want=WRITE, pages=sets, **fields)])

    def want(self, room: int, want: pb.Want.ValueType, **fields: Any) -> DecodeClient:
        return self.send(rooms=[pb.DecodeRoom(room=room, want=want, **fields)])

    def read(self, seconds: float = SECONDS) -> pb.SessionResponse:
        """The next message; an empty one is a heartbeat. Fails when the stream ended or nothing came."""
        try:
            message = self._responses.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"nothing within {seconds} s") from None
        assert message is not None, f"the stream ended: {self.error}"
        self.kept.append(message)
        return message

    def room(self, room: int, until: Callable[[Any], bool] = lambda entry: True) -> Any:
        """The next state of a room for which ``until`` holds."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for entry in self.read().rooms:
                if entry.room == room and until(entry):
                    return entry
        raise AssertionError(f"no such state of room {room} within {SECONDS} s")

    def ended(self, room: int) -> Any:
        """The room's terminal state, once its writes are not open any more."""
        return self.room(room, lambda entry: entry.state >= SUCCESS and entry.writes > OPEN)

    def goodbye(self) -> Failure:
        while True:
            message = self.read()
            if message.HasField("goodbye"):
                return failure_from_pb(message.goodbye.failure)

    def quiet(self, seconds: float = 0.35) -> bool:
        """Nothing but heartbeats comes for a while."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self._responses.get(timeout=left) != pb.SessionResponse():
                    return False
            except queue.Empty:
                break
        return True

    def over(self, seconds: float = SECONDS) -> grpc.RpcError | None:
        """Waits for the end of the stream, whatever comes before; its status if it was not OK."""
        deadline = time.monotonic() + seconds
        while self._responses.get(timeout=max(0.01, deadline - time.monotonic())) is not None:
            pass
        return self.error

    def finish(self) -> None:
        """Half-closes: no more requests."""
        self._requests.put(None)

    def close(self) -> None:
        self.finish()
        if self._call is not None:
            self._call.cancel()
        self._channel.close()

    def _read(self) -> None:
        responses = self._responses
        try:
            for message in self._call:
                responses.put(message)
        except grpc.RpcError as error:
            self.error = error
        responses.put(None)


Script = Callable[["PrefillServer", Iterator[pb.SessionRequest]], Iterable["pb.SessionResponse | bytes"]]


class PrefillServer:
    """A prefill rank that is not there: ``script`` answers each session with messages, or with raw bytes."""

    numbers = itertools.count(1)

    def __init__(self, script: Script, registry: str, pool: Pool, address: str = "127.0.0.1:0") -> None:
        self.engine = f"F{next(self.numbers)}"
        self.ref = RankRef(RankId(self.engine), new_epoch())
        self.script = script
        self.sessions = 0
        self.heard: list[pb.SessionRequest] = []
        self.stopping = threading.Event()
        self._open: list[Any] = []
        self._server = grpc.server(ThreadPoolExecutor(16), options=(("grpc.so_reuseport", 0), *UNLIMITED))
        handler = grpc.stream_stream_rpc_method_handler(
            self._serve,
            request_deserializer=pb.SessionRequest.FromString,
            response_serializer=lambda each: each if isinstance(each, bytes) else each.SerializeToString(),
        )
        generic = grpc.method_handlers_generic_handler("kvgrpc.v1.TransferService", {"Session": handler})
        self._server.add_generic_rpc_handlers((generic,))
        host, _, port = address.rpartition(":")
        self.address = f"{host}:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        self._server.start()
        row = registry_pb.RankRow(
            rank=rank_ref_to_pb(self.ref),
            role=common_pb2.ROLE_PREFILL,
            endpoints=registry_pb.Endpoints(grpc=self.address),
            layout=layout_to_pb(Layout()),
            pools=[pool_to_pb(pool.without_addresses())],
            data_plane="shm",
        )
        with grpc.insecure_channel(registry) as channel:
            RegistryServiceStub(channel).Register(registry_pb.RegisterRequest(rows=[row]), timeout=SECONDS)
        self.bootstrap = f"{registry}/{self.engine}"

    def welcome(self, **changes: Any) -> pb.SessionResponse:
        welcome = pb.Welcome(max_frame_bytes=4 << 20)
        welcome.rank.CopyFrom(rank_ref_to_pb(self.ref))
        welcome.MergeFrom(pb.Welcome(**changes))
        return pb.SessionResponse(welcome=welcome)

    def end_sessions(self) -> None:
        """Breaks every session that is open: no Goodbye."""
        for context in list(self._open):
            context.cancel()

    def close(self) -> None:
        self.stopping.set()
        self._server.stop(0).wait(SECONDS)

    def _serve(self, requests: Iterator[pb.SessionRequest], context: Any) -> Iterator[Any]:
        self.sessions += 1
        self._open.append(context)

        def listen() -> Iterator[pb.SessionRequest]:
            for request in requests:
                self.heard.append(request)
                yield request

        try:
            yield from self.script(self, listen())
        except grpc.RpcError:
            return


@contextlib.contextmanager
def closed_in_the_end(make: Callable[..., Made]) -> Iterator[Callable[..., Made]]:
    """The same maker; what it made is closed after."""
    made: list[Made] = []

    def make_one(*arguments: Any, **named: Any) -> Made:
        made.append(make(*arguments, **named))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.plane.close(1.0)


def said(room: int, state: int, writes: int = SETTLED, **fields: Any) -> pb.SessionResponse:
    """A frame with one room, as a prefill would say it; also with numbers that no prefill says."""
    entry = pb.PrefillRoom(room=room, **fields)
    entry.state, entry.writes = state, writes  # type: ignore[assignment]
    return pb.SessionResponse(rooms=[entry])


def named(host: RankHost, room: int) -> None:
    """Waits until the rank has heard of the room."""
    wait_until(lambda: RoomKey(room) in core_of(host).rooms)


def sender_of(host: RankHost, room: int) -> Any:
    return KVSender(cast(Any, host.rank.transfer), "", room)


def receiver_of(host: RankHost, bootstrap: str, room: int, **more: Any) -> Any:
    return KVReceiver(cast(Any, host.rank.transfer), bootstrap, room, **more)


def core_of(host: RankHost) -> Any:
    return host.rank.transfer.core


def session_with(host: RankHost, peer: RankHost) -> Any:
    """The host's end of its session with the peer; None: there is none."""
    sessions = cast(Any, host.rank.transfer)._sessions.items()
    found = (session for known, session in sessions if getattr(known, "pair", known).ref == peer.rank.ref)
    return next(found, None)


def session_tasks(host: RankHost) -> int:
    """Tasks of the rank's loop that serve or hold a session."""
    loop = host.rank._loop.loop

    async def count() -> int:
        return sum("session" in repr(task) or "Session" in repr(task) for task in asyncio.all_tasks(loop))

    return host.rank._loop.run(count(), SECONDS)
