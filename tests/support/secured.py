"""A server with every method of the role table, and calls of it by callers of each role."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvgrpc.errors import KvGrpcError
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.interceptors import ALLOWED
from kvgrpc.rpc.security import CallerRole, ClientSecurity, ServerSecurity, Token
from kvgrpc.rpc.server import add_methods
from kvgrpc.server.port.listener import Listener
from tests.support.serving import failure, once

SECRETS = {role: f"secret-of-{role.value}" for role in CallerRole}
TOKENS = tuple(Token(role, secret) for role, secret in SECRETS.items())
WITH_TOKENS = ServerSecurity(tokens=TOKENS)
OPERATOR = ClientSecurity(token=SECRETS[CallerRole.OPERATOR])
DRAIN = "/kvgrpc.v1.ServerService/Drain"
WATCH = "/kvgrpc.v1.EventService/Watch"
STREAMS_OF_REQUESTS = ("KeepAlive", "Session")
STREAMS_OF_RESPONSES = ("KeepAlive", "Session", "Watch")


class Everything:
    """Answers every method of the role table with what it was sent; ``reached`` names them."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    def add_to(self, server: grpc.aio.Server) -> list[str]:
        services: dict[str, dict[str, Any]] = {}
        for path in ALLOWED:
            _, service, method = path.split("/")
            services.setdefault(service, {})[method] = self._handler(path, method)
        for name, methods in services.items():
            add_methods(server, name, methods)
        return list(services)

    def _handler(self, path: str, method: str) -> Any:
        async def single(request: bytes, context: Any) -> bytes:
            self.reached.append(path)
            return request

        async def stream(request: Any, context: Any) -> None:
            self.reached.append(path)
            await context.write(b"")

        if method in STREAMS_OF_REQUESTS:
            return grpc.stream_stream_rpc_method_handler(stream)
        if method in STREAMS_OF_RESPONSES:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(single)


@contextlib.asynccontextmanager
async def listening(security: ServerSecurity, address: str = "127.0.0.1:0") -> AsyncIterator[tuple[str, Everything]]:
    everything = Everything()
    listener = Listener()
    (bound,) = await listener.start(everything.add_to, [address], security)
    try:
        yield bound, everything
    finally:
        await listener.stop(0.0)


async def call(address: str, path: str, security: ClientSecurity | None = None, timeout: float = 5.0) -> None:
    """One whole call; raises what the caller of it would see."""
    method = path.rpartition("/")[2]
    channel: Any = open_channel(address, security, own_connection=True)
    async with channel:
        if method in STREAMS_OF_REQUESTS:
            assert await channel.stream_stream(path)(once(b""), timeout=timeout).read() == b""
        elif method in STREAMS_OF_RESPONSES:
            assert await channel.unary_stream(path)(b"", timeout=timeout).read() == b""
        else:
            assert await channel.unary_unary(path)(b"", timeout=timeout) == b""


async def refusal(address: str, path: str, security: ClientSecurity | None = None) -> KvGrpcError:
    """Asked again when the library lost the status because the request was still being written (grpc.aio, streams)."""
    for _ in range(5):
        error = await failure(call(address, path, security))
        if error.message != "Internal error from Core":
            break
    return error
