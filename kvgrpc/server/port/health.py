"""grpc.health.v1, one status per service. The library's own lets one watcher that is slow or gone hold up all others
(grpc#43403)."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.errors import KvGrpcError

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class UnknownService(KvGrpcError):
    """The answer that the health protocol asks for: a bare NOT_FOUND."""

    code = "NOT_FOUND"


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Answers from a table; each watcher waits for changes by itself. Lives on one event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()

    def set(self, service: str, serving: bool) -> None:
        """Sets the status of a service and tells its watchers of a change. The empty name is the whole server."""
        status = _SERVING if serving else _NOT_SERVING
        if self._statuses.get(service) != status:
            self._statuses[service] = status
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def serving(self, service: str) -> bool:
        """On any thread."""
        return self._statuses.get(service) == _SERVING

    async def Check(self, request: health_pb2.HealthCheckRequest, context: object) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            raise UnknownService(f"this server has no service {request.service[:128]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        told = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            await changed.wait()
