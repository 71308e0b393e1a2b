"""Opens channels: the one place where options and credentials of a client meet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from kvgrpc import forks
from kvgrpc.net import check_target, is_unix, split
from kvgrpc.rpc.credentials.tokens import AUTHORIZATION
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.options import (
    CHANNEL_OPTIONS,
    NAMED_LOCALHOST,
    OWN_CONNECTION,
    SELDOM,
    SESSION,
    Pings,
    server_name,
    with_pings,
)
from kvgrpc.rpc.security import ClientSecurity

# Streams last as long as their readers want; the library asks for some bound.
_CALLS_END_SECONDS = 365 * 86_400.0


def open_channel(
    address: str,
    security: ClientSecurity | None = None,
    *,
    own_connection: bool = False,
    pings: Pings | None = None,
    seldom: bool = False,
) -> grpc.aio.Channel:
    """A channel to "host:port" or "unix:/path", for the running event loop; connects when it is first used.

    ``own_connection``: a TCP connection that no other channel shares. ``pings``: of a session, quicker ones than usual.
    ``seldom``: it hangs up some seconds after a call, and the next one connects again. Raises AddressNotAllowed for a
    token that would travel in plaintext, InvalidRequest for what is no address, half a configuration and a file that
    cannot be used, RuntimeError outside an event loop.
    """
    asyncio.get_running_loop()
    security = security or ClientSecurity()
    security.check(address)
    check_target(address)
    options = with_pings(CHANNEL_OPTIONS, pings)
    for wanted, more in ((own_connection, OWN_CONNECTION), (pings is not None, SESSION), (seldom, SELDOM)):
        options += more if wanted else ()
    if security.server_name:
        options += server_name(security.server_name)
    credentials = security.credentials()
    if credentials is None:
        if is_unix(address):
            options += NAMED_LOCALHOST
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    host, port = split(address)
    if port.isdigit():
        forks.dials(channel, [(host, int(port))])  # of a name the child cannot tell the addresses
    header = security.header_source(address)
    return channel if header is None else TokenChannel(channel, header)


def retire(channel: grpc.aio.Channel) -> None:
    """Closes a channel once the calls that are under way on it have ended: closed at once, it would cancel them, and
    whoever awaits one cannot tell that from a cancellation of its own task."""
    background(channel.close(_CALLS_END_SECONDS), "channel-close")


class TokenChannel(grpc.aio.Channel):
    """A channel that sends a bearer token along with every call.

    Call credentials are silently dropped on a plaintext channel (grpc#19234), and the library's interceptors pass each
    message of a stream through a queue; this touches a call once, when it begins.
    """

    def __init__(self, channel: grpc.aio.Channel, header: Callable[[], str]) -> None:
        self._channel = channel
        self._header = header

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._with_token(self._channel.unary_unary(method, *arguments, **options))

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._with_token(self._channel.unary_stream(method, *arguments, **options))

    def stream_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._with_token(self._channel.stream_unary(method, *arguments, **options))

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._with_token(self._channel.stream_stream(method, *arguments, **options))

    async def __aenter__(self) -> TokenChannel:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def _with_token(self, multi_callable: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*arguments: Any, metadata: Any = None, **options: Any) -> Any:
            headers = (*(metadata or ()), (AUTHORIZATION, self._header()))
            return multi_callable(*arguments, metadata=headers, **options)

        return begin
