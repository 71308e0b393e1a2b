"""A client without an event loop: each call on the process's loop thread, for which it blocks."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

from kvgrpc.client.aio import Client
from kvgrpc.errors import PeerUnreachable
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.rpc.within import check_seconds

C = TypeVar("C", bound="BlockingClient")
T = TypeVar("T")
_MARGIN_SECONDS = 5.0
_ENGINE_MARGIN_SECONDS = 15.0
# Each rank has its own timeout; thousands of them that do not answer are asked one after another.
_FLEET_SECONDS = 600.0
# A server asks its registry for up to 10 s.
_UNDRAIN_SECONDS = 20.0


class BlockingClient:
    """The base of ``SyncClient``, whose methods are generated from those of ``Client``."""

    def __init__(self, address: str, security: ClientSecurity | None = None, timeout: float = 10.0) -> None:
        self._client = Client(address, security, timeout)
        self._security = security
        self._seconds = timeout + _MARGIN_SECONDS
        self._loop = LoopThread.shared()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._client.close())

    @property
    def address(self) -> str:
        return self._client.address

    def _seconds_of_watch_engines(self, **_: object) -> float:
        return self._seconds + _ENGINE_MARGIN_SECONDS

    def _seconds_of_ask_ranks(self, *_: object) -> float:
        return _FLEET_SECONDS

    def _seconds_of_drain(self, grace: float) -> float:
        check_seconds("grace", grace)
        return self._seconds + 2 * grace

    def _seconds_of_undrain(self, *_: object) -> float:
        return max(self._seconds, _UNDRAIN_SECONDS)

    def _iterate(self, parts: AsyncIterator[T], seconds: float | None = None) -> Iterator[T]:
        ended = object()

        async def following() -> object:
            return await anext(parts, ended)

        async def close() -> None:
            await parts.aclose()  # type: ignore[attr-defined]  # it is an async generator

        try:
            while True:
                part = self._run(following(), seconds)
                if part is ended:
                    return
                yield part  # type: ignore[misc]  # the sentinel is the only other value
        finally:
            # A program may end without closing it; the loop's thread no longer runs then.
            if not sys.is_finalizing():
                self._run(close())

    def _run(self, coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        try:
            return self._loop.run(coroutine, seconds or self._seconds)
        except TimeoutError as error:
            raise PeerUnreachable(f"{self.address}: {error}", metadata={"address": self.address}) from None
