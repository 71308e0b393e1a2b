"""A registry that refuses each GetEngine with the reason that the engine is named after, as servers send it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from kvgrpc.errors import KvGrpcError, Reason, exception_of
from kvgrpc.registry.servicer import RegistryServicer
from kvgrpc.registry.store.memory import MemoryStore
from kvgrpc.rpc.status import DETAILS_KEY, DOMAIN, trailing
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.registry_service_pb2_grpc import add_RegistryServiceServicer_to_server

_SECONDS = 10.0


class Refusing:
    """Serves in a thread of its own until ``end``."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._server: Any = None
        self.port = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(_SECONDS)

    async def _serve(self) -> int:
        self._server = grpc.aio.server()
        add_RegistryServiceServicer_to_server(_Servicer(MemoryStore()), self._server)
        port: int = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    def end(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(0), self._loop).result(_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)


class _Servicer(RegistryServicer):
    async def GetEngine(self, request: pb.GetEngineRequest, context: Any) -> pb.GetEngineResponse:
        known = request.engine.partition(":")[0] in Reason.__members__
        await context.abort(*(trailing(_error(request.engine)) if known else _of_tomorrow(request.engine)))
        raise AssertionError("abort raises")


def _error(name: str) -> KvGrpcError:
    """``REASON`` or ``REASON:500``, with a time in milliseconds after which the call may be repeated."""
    reason, _, wait = name.partition(":")
    metadata = {"named": reason, "text": "a b=c ü"}
    return exception_of(Reason[reason])("refused", metadata=metadata, retry_after=int(wait) / 1000 if wait else None)


def _of_tomorrow(name: str) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """What a newer server would refuse with."""
    code = grpc.StatusCode.FAILED_PRECONDITION
    status = status_pb2.Status(code=code.value[0], message="refused")
    reason = f"ERROR_REASON_{name}"
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata={"named": name}))
    return code, "refused", ((DETAILS_KEY, status.SerializeToString()),)
