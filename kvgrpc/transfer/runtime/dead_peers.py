"""Over which connections bytes of dead peers could still arrive (8, pages by evidence): looked at beside the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from kvgrpc.transfer.protocol.decode.core import DecodePair
from kvgrpc.transfer.runtime.guarded import GuardedPlane


class DeadPeers:
    """Asks the data plane on a thread, because the kernel's tables take long to read, and about many peers at once.

    On the loop. ``begin``: starts a task that ends with the rank.
    """

    def __init__(self, plane: GuardedPlane, begin: Callable[[Coroutine[None, None, None], str], object]) -> None:
        self._plane = plane
        self._begin = begin
        self._asked: dict[DecodePair, bytes] = {}
        self._told: dict[DecodePair, frozenset[str] | None] = {}
        self._looking = False

    def connections(self, pair: DecodePair, address: bytes) -> frozenset[str] | None:
        """Returns what was found after it was asked about this pair before; None: nothing yet. It looks again."""
        self._asked[pair] = address
        if not self._looking:
            self._looking = True
            self._begin(self._look(), "connections of dead peers")
        return self._told.pop(pair, None)

    def forget(self, is_known: Callable[[DecodePair], bool]) -> None:
        """Forgets what was found of pairs that are known no more."""
        self._told = {pair: names for pair, names in self._told.items() if is_known(pair)}

    async def _look(self) -> None:
        try:
            while self._asked:
                asked, self._asked = self._asked, {}
                addresses = list(asked.values())
                loop = asyncio.get_running_loop()
                try:
                    found = await loop.run_in_executor(None, self._plane.connections_from_each, addresses)
                except RuntimeError:  # the system has no thread left: they are asked about again
                    return
                self._told.update(zip(asked, found, strict=True))
        finally:
            self._looking = False
