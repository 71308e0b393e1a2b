"""The words of a process to a kubelet and to Prometheus: its HTTP port, and the gauges of a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvgrpc.observability.http import Checks, StatusServer
from kvgrpc.observability.ranks import RankGauges, forget_rank, watch_rank
from kvgrpc.registry.client.registration import STATES
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.transfer.protocol.types import SessionState
from kvgrpc.transfer.runtime.boundary import Runtime

_READ_SECONDS = 1.0


class RankStatus:
    """Of one rank, from ``open`` to ``close``. ``listen``: "host:port" of the HTTP port, empty for none;
    ``registration``: what its registration is at, "none" without one.
    """

    def __init__(
        self, listen: str, loop: LoopThread, transfer: Runtime, registration: Callable[[], str] = lambda: "none"
    ) -> None:
        self._listen = listen
        self._loop = loop
        self._transfer = transfer
        self._registration = registration
        self._server: StatusServer | None = None

    def open(self, live: Checks, ready: Checks) -> None:
        """Opens the port, with checks as of ``StatusServer``."""
        if self._listen:
            self._server = StatusServer(self._listen, live, ready)
        watch_rank(self._read)

    @property
    def address(self) -> str:
        """ "host:port" as bound; empty where nothing listens."""
        return "" if self._server is None else self._server.address

    def close(self) -> None:
        forget_rank(self._read)
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _read(self) -> RankGauges:
        """On the thread of a scraper: the tables belong to the loop."""
        return self._loop.run(self._look(), _READ_SECONDS)

    async def _look(self) -> RankGauges:
        transfer = self._transfer
        sessions = Counter({state.name.lower(): 0 for state in SessionState})
        sessions.update(row.state.name.lower() for row in transfer.sessions())
        registrations = Counter(dict.fromkeys(("none", *STATES), 0))
        registrations[self._registration()] += 1
        held, limit = transfer.held_pages, transfer.held_pages_limit
        open_rooms, depths = transfer.open_rooms(), transfer.depths()
        rooms = await transfer.rooms_by_state()
        return RankGauges(transfer.role, open_rooms, held, limit, sessions, rooms, depths, registrations)
