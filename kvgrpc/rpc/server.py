"""Makes servers of grpc.aio that a stranger's path cannot end.

Since 1.84 the library decodes the path of a call in the task that accepts calls: one path that is not UTF-8 ends the
task, and with it the whole server, before anybody was asked for credentials. It decodes the paths of unregistered
methods only, so ours are registered (generated code does that, ``add_absent`` the rest), and any other call gets
its UNIMPLEMENTED here, without a look at its path. tests/contract/hostile/test_strangers.py shows both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping, Sequence
from typing import Any, cast

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # an extension module

from kvgrpc.errors import FeatureDisabled
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.methods import ALLOWED
from kvgrpc.rpc.options import Options
from kvgrpc.rpc.turns import Turns


class Server(grpc.aio.Server):
    """A server of grpc.aio that knows which methods it was given. Make it with ``new_server``."""

    paths: set[str]

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        self.paths.update(f"/{service_name}/{name}" for name in method_handlers)
        super().add_registered_method_handlers(service_name, method_handlers)


def new_server(interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options) -> Server:
    """Makes what ``grpc.aio.server`` does; methods count only where they are registered, as generated code does it."""
    server: Any = grpc.aio.server(interceptors=interceptors, options=options)
    server.__class__ = type("Server", (Server, type(server)), {})
    server.paths = set()
    if hasattr(cygrpc.AioServer, "_make_request_call_future"):
        # The one that it was made with was not started, and binds nothing.
        server._server = _acceptor(tuple(interceptors), options)
    return cast(Server, server)


def add_methods(server: grpc.aio.Server, service: str, handlers: Mapping[str, Any]) -> None:
    """Adds handlers by the name of their method, both ways that servers know: older ones look at the first only."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, dict(handlers)),))
    server.add_registered_method_handlers(service, dict(handlers))


def add_absent(server: grpc.aio.Server, present: Container[str] = ()) -> None:
    """Methods of ours that are not ``present`` answer FEATURE_DISABLED. After all others were added."""
    absent: dict[str, dict[str, Any]] = {}
    for path in ALLOWED:
        if path not in present:
            _, service, method = path.split("/")
            absent.setdefault(service, {})[method] = _refusing(service)
    for service, handlers in absent.items():
        add_methods(server, service, handlers)


def _refusing(service: str) -> Any:
    async def refuse(requests: Any, context: Any) -> None:
        raise FeatureDisabled(
            f"this process does not serve {service}: ask another one, GetServerInfo says what each serves",
            metadata={"feature": service, "howToEnable": "ask a process that serves it"},
        )

    # Reads no request, so it answers methods of every arity.
    return grpc.stream_stream_rpc_method_handler(refuse)


def _acceptor(interceptors: tuple[grpc.aio.ServerInterceptor, ...], options: Options) -> Any:
    class Acceptor(cygrpc.AioServer):  # type: ignore[misc]
        """The library's own, which leaves calls of unregistered methods to us."""

        def _make_request_call_future(self, method: bytes | None) -> Any:
            loop = asyncio.get_running_loop()
            if method is None:
                return loop.create_task(self._answer_unregistered(), name="kvgrpc-unregistered")
            return loop.create_task(self._accept(method), name="kvgrpc-accept")

        async def _accept(self, method: bytes) -> Any:
            """The next call of a method, once what was refused to others is paid for."""
            call = await self._request_registered_call(method)
            await Turns.of_this_loop().room()
            return call

        async def _answer_unregistered(self) -> None:
            """Ends by the exception that the library waits for when the server stops."""
            loop = asyncio.get_running_loop()
            nothing = cygrpc._MethodResolver([], {})
            while True:
                call = await self._request_call()
                answer = cygrpc._handle_rpc("unregistered", nothing, (), call, loop, False)
                background(cygrpc._schedule_rpc_coro(answer, call, loop, "unregistered"), "kvgrpc-unregistered-call")

    return Acceptor(asyncio.get_running_loop(), None, (), interceptors, options, None)
