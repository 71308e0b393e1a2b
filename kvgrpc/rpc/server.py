"""Makes servers of grpc.aio that a stranger's path cannot end.

Since 1.84 the library decodes the path of a call in the task that accepts calls: one path that is not UTF-8 ends the
task, and with it the whole server, before anybody was asked for credentials. It decodes the paths of unregistered
methods only, so ours are registered (generated code does that, ``register_absent`` the rest), and any other call gets
its UNIMPLEMENTED here, without a look at its path. tests/contract/hostile/test_strangers.py shows both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # an extension module

from kvgrpc.errors import FeatureDisabled
from kvgrpc.rpc.interceptors.auth import ALLOWED
from kvgrpc.rpc.options import Options

_log = logging.getLogger(__name__)


def new_server(interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options) -> grpc.aio.Server:
    """As ``grpc.aio.server``; methods count only where they are registered, as generated code does it."""
    server = grpc.aio.server(interceptors=interceptors, options=options)
    if hasattr(cygrpc.AioServer, "_make_request_call_future"):
        loop = asyncio.get_running_loop()
        safe: Any = _acceptor_class()(loop, None, (), tuple(interceptors), options, None)
        # The one that it was made with was not started, and binds nothing.
        server._server = safe  # type: ignore[attr-defined]
    return server


def register_absent(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Methods of ours whose service is not among ``services`` answer FEATURE_DISABLED."""
    absent: dict[str, dict[str, Any]] = {}
    for path in ALLOWED:
        _, service, method = path.split("/")
        if service not in services:
            absent.setdefault(service, {})[method] = _refusing(service)
    for service, handlers in absent.items():
        server.add_registered_method_handlers(service, handlers)


def _refusing(service: str) -> Any:
    async def refuse(requests: Any, context: Any) -> None:
        raise FeatureDisabled(
            f"this process does not serve {service}: ask another one, GetServerInfo says what each serves",
            metadata={"feature": service, "howToEnable": "ask a process that serves it"},
        )

    # Reads no request, so it answers methods of every arity.
    return grpc.stream_stream_rpc_method_handler(refuse)


def _acceptor_class() -> Any:
    class Acceptor(cygrpc.AioServer):  # type: ignore[misc]
        """The library's own, which leaves calls of unregistered methods to us."""

        def _make_request_call_future(self, method: bytes | None) -> Any:
            if method is not None:
                return super()._make_request_call_future(method)
            return asyncio.get_running_loop().create_task(self._answer_unregistered(), name="kvgrpc-unregistered")

        async def _answer_unregistered(self) -> None:
            """Ends by the exception that the library waits for when the server stops."""
            loop, answers = asyncio.get_running_loop(), set[asyncio.Task[None]]()
            nothing = cygrpc._MethodResolver([], {})
            while True:
                call = await self._request_call()
                answer = cygrpc._handle_rpc("unregistered", nothing, (), call, loop, False)
                task = loop.create_task(cygrpc._schedule_rpc_coro(answer, call, loop, "unregistered"))
                answers.add(task)
                task.add_done_callback(answers.discard)

    return Acceptor
