"""Drain and undrain of a server that holds nothing which a drain would have to wait for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from kvgrpc.errors import ServerDraining
from kvgrpc.server.port.listener import Listener


class Drains(Protocol):
    """A servicer that turns new calls away until it is told to go on."""

    def drain(self) -> None: ...

    def undrain(self) -> None: ...


class DrainsAtOnce:
    """One servicer behind one listener. ``_closing``: it ends, and takes no drain back."""

    address: str
    _listener: Listener
    _servicer: Drains
    _closing: bool

    async def drain(self, grace: float) -> tuple[bool, int]:
        """Turns new calls away; (nothing is left, nothing is open)."""
        self._servicer.drain()
        await self._listener.drain()
        return True, 0

    async def undrain(self, end_drain: Callable[[], Awaitable[None]]) -> None:
        """Raises ServerDraining: who ends takes no drain back."""
        if self._closing:
            raise ServerDraining(f"{self.address} is about to end")
        await end_drain()
        self._servicer.undrain()
        self._listener.undrain()
