"""A caller whose calls stay open, as many as it may."""

from __future__ import annotations

import queue
from typing import Any, cast

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import event_service_pb2
from kvgrpc.v1 import registry_service_pb2 as registry_pb
from kvgrpc.v1 import transfer_service_pb2 as pb
from tests.support.rank_host import RankHost
from tests.support.secrets import bearer
from tests.support.waiting import wait_until

# Of those without one it comes on the stream, later.
REQUESTS: dict[str, Message] = {
    "/kvgrpc.v1.EventService/Watch": event_service_pb2.WatchRequest(mode=event_service_pb2.WATCH_MODE_TAIL),
    "/kvgrpc.v1.RegistryService/WatchEngines": registry_pb.WatchEnginesRequest(),
    "/grpc.health.v1.Health/Watch": health_pb2.HealthCheckRequest(),
    "/kvgrpc.v1.TransferService/LocateRooms": pb.LocateRoomsRequest(rooms=[pb.RoomKey(room=987_654_321)]),
}


SECONDS = 40


class Caller:
    """Opens calls that stay open, with one token."""

    def __init__(self, host: RankHost, token: str, name: str) -> None:
        self._channel: Any = grpc.insecure_channel(host.rank.address, options=(("grpc.use_local_subchannel_pool", 1),))
        self._metadata = (("authorization", bearer(token, host.rank.address)),)
        self._counts = cast(Any, host.rank)._parts.listener._admission._of_callers
        self._name = name
        self._open: list[tuple[Any, queue.SimpleQueue[bytes | None]]] = []

    def call(self, path: str) -> Any:
        more: dict[str, Any] = {"metadata": self._metadata, "timeout": SECONDS}
        nothing_yet: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        request = REQUESTS.get(path)
        if request is None:
            call: Any = self._channel.stream_stream(path)(iter(nothing_yet.get, None), **more)
        elif path.endswith("/LocateRooms"):
            call = self._channel.unary_unary(path).future(request.SerializeToString(), **more)
        else:
            call = self._channel.unary_stream(path)(request.SerializeToString(), **more)
        self._open.append((call, nothing_yet))
        return call

    def hold(self, path: str) -> Any:
        """A call that the server has let in."""
        before = self.open_calls(path)
        call = self.call(path)
        wait_until(lambda: self.open_calls(path) == before + 1 or call.done())
        assert not call.done(), call.code()
        return call

    def open_calls(self, path: str) -> int:
        name = "reflection streams" if "reflection" in path else path.rpartition("/")[2]
        shares = self._counts.get((name, self._name))
        return 0 if shares is None else int(shares.count)

    def refusal(self, path: str) -> Any:
        call = self.call(path)
        with pytest.raises(grpc.RpcError) as refused:
            call.result(SECONDS)
        return error_from(refused.value)

    def close(self) -> None:
        for call, requests in self._open:
            requests.put(None)
            call.cancel()
        self._channel.close()
