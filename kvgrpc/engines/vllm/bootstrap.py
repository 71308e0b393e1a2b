"""The bootstrap port of a prefill engine: our registry, and the one question that proxies of vLLM's own Mooncake
connector ask there, ``GET /query``, which engine is behind it.

gRPC's server takes HTTP/2 only, so a listener in front of it looks at the first bytes of each connection: the question
is answered, everything else goes to the registry byte by byte. The registry still sees who came: what one caller may
have, and whether a rank may advertise loopback, depends on that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
from dataclasses import replace

from kvgrpc.errors import AddressNotAllowed
from kvgrpc.net import socket_passing_on, split
from kvgrpc.observability import metrics
from kvgrpc.observability.logging import RateLimited
from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.rpc.within import within
from kvgrpc.server import RegistryServer

_QUESTION = b"GET /query"
_MOST_CONNECTIONS = 1024
_FIRST_BYTES_SECONDS = 5.0
_PIECE = 64 * 1024
_START_SECONDS = 10.0

_log = logging.getLogger(__name__)


class Bootstrap:
    """Serves ``address`` ("host:port"). ``open`` and ``close`` block; for other threads than the loop's.

    ``open`` raises AddressNotAllowed for a port that is taken, or plaintext that others reach.
    """

    def __init__(
        self,
        address: str,
        engine_id: str,
        security: ServerSecurity | None,
        lease_ttl: float,
        call_limits: CallLimits | None = None,
    ) -> None:
        self._address = address
        security = security or ServerSecurity()
        # The registry itself is bound elsewhere.
        self._security = replace(security, audience=(*security.audience, address))
        self._answer = _http(json.dumps({"0": {"engine_id": engine_id, "worker_addr": {}}}))
        # In the abstract namespace, where a kill leaves nothing behind. It asks for the same proof as the port.
        self._path = f"kvgrpc-registry-{os.getpid()}-{secrets.token_hex(8)}"
        self._registry = RegistryServer(
            [f"unix-abstract:{self._path}"], self._security, lease_ttl, call_limits=call_limits
        )
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._lines = RateLimited(_log)

    def open(self) -> Bootstrap:
        self._security.check(self._address)
        self._registry.open()
        try:
            LoopThread.shared().run(self._listen(), _START_SECONDS)
        except BaseException:
            self._registry.close()
            raise
        return self

    def close(self) -> None:
        LoopThread.shared().run(self._stop(), _START_SECONDS)
        self._registry.close()

    async def _listen(self) -> None:
        host, port = split(self._address)
        try:
            self._server = await asyncio.start_server(self._serve, host, int(port), limit=_PIECE)
        except OSError as error:
            raise AddressNotAllowed(
                f"{self._address} cannot be bound: {error.strerror}; give each prefill engine its own bootstrap_port",
                metadata={"address": self._address, "configKey": "bootstrap_port"},
            ) from error

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MOST_CONNECTIONS:
            self._refuse(writer)
            return
        self._connections.add(writer)
        try:
            await self._answer_or_pass_on(reader, writer)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the peer's affair
        finally:
            self._connections.discard(writer)
            writer.close()

    def _refuse(self, writer: asyncio.StreamWriter) -> None:
        metrics.BOOTSTRAP_REFUSED.inc()
        host = writer.get_extra_info("peername")[0]
        text = f"the bootstrap port {self._address} has {_MOST_CONNECTIONS} connections: one of {host} was closed"
        self._lines.warning("connections that are too many", text)
        writer.close()

    async def _answer_or_pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await within(_FIRST_BYTES_SECONDS, reader.readexactly(len(_QUESTION)))
        if first == _QUESTION:
            await within(_FIRST_BYTES_SECONDS, _rest_of_head(reader))
            writer.write(self._answer)
            await writer.drain()
            return
        registry_reader, registry_writer = await self._dial(*writer.get_extra_info("peername")[:2])
        registry_writer.write(first)
        ways = [
            asyncio.ensure_future(_copy(reader, registry_writer)),
            asyncio.ensure_future(_copy(registry_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            registry_writer.close()

    async def _dial(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the registry of whoever came from there."""
        ours = socket.socket(socket.AF_UNIX)
        try:
            ours.setblocking(False)
            ours.bind(socket_passing_on(host, port))
            await asyncio.get_running_loop().sock_connect(ours, "\0" + self._path)
            return await asyncio.open_unix_connection(sock=ours, limit=_PIECE)
        except BaseException:
            ours.close()
            raise


async def _rest_of_head(reader: asyncio.StreamReader) -> None:
    await reader.readuntil(b"\r\n\r\n")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()


def _http(body: str) -> bytes:
    head = ("HTTP/1.1 200 OK", "Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close")
    return "\r\n".join((*head, "", body)).encode()
