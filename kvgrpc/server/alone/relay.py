"""Journal, snapshots and Watch for an engine that publishes its events by itself."""

from __future__ import annotations

import time

import msgspec

from kvgrpc.errors import InvalidRequest
from kvgrpc.events import EventsConfig, JournalingPublisher
from kvgrpc.events.endpoints import check_reached
from kvgrpc.model import Layout, RankId, RankRef, check_rank, new_epoch
from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.server.alone.events import EventServer

_LOOK_SECONDS = 0.005


class EventRelay:
    """The events of one engine's publisher, served at ``listen``. ``open`` and ``close`` block.

    ``endpoint``, ``replay``, ``topic``: see events.live.relay; ``engine``, ``dp``: whose events they are called;
    ``events``: keys of EventsConfig for the journal and its readers, as JSON or a mapping.
    """

    metrics_address = ""

    def __init__(
        self,
        listen: str,
        endpoint: str,
        engine: str,
        *,
        dp: int = 0,
        replay: str = "",
        topic: str = "",
        security: ServerSecurity | None = None,
        call_limits: CallLimits | None = None,
        events: object = None,
    ) -> None:
        """Raises InvalidRequest for a name or an endpoint that is none, and for keys that cannot be."""
        from kvgrpc.events.live.relay import Relay  # loads zmq

        rank = RankRef(RankId(engine, dp), new_epoch())
        check_rank(rank, Layout(dp=dp + 1))
        if dp >= 2**32:
            raise InvalidRequest.of("dp", dp, "below 2^32")
        for field, where in (("endpoint", endpoint), ("replay", replay or endpoint)):
            try:
                check_reached(where)
            except ValueError as error:
                raise InvalidRequest.of(field, where, f"an endpoint to connect to ({error})") from None
        try:
            config = EventsConfig.parse(events or {})
        except (ValueError, RecursionError) as error:
            raise InvalidRequest.of("events", str(events)[:200], str(error)) from None
        self._publisher = JournalingPublisher(rank, msgspec.structs.replace(config, publisher="null"))
        try:
            self._relay = Relay(endpoint, self._publisher, replay=replay, topic=topic)
            self._server = EventServer(self._publisher, [listen], security, call_limits, config.max_watches, self._well)
        except BaseException:
            self._publisher.shutdown(0.0)
            raise

    def _well(self) -> bool | str:
        return self._relay.healthy or "it does not read the engine's publisher"

    @property
    def address(self) -> str:
        return self._server.address

    def open(self) -> EventRelay:
        """Raises AddressNotAllowed for an address that is taken, or plaintext that others reach: nothing stays then."""
        self._relay.open()
        try:
            self._server.open()
        except BaseException:
            self._relay.close()
            self._publisher.shutdown(0.0)
            raise
        return self

    def asked(self, timeout: float) -> bool:
        """Waits until it serves all that the engine's replay endpoint had; False: not within ``timeout`` seconds."""
        end = time.monotonic() + timeout
        if not self._relay.asked.wait(timeout):
            return False
        while self._publisher.counts.unsent and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        return not self._publisher.counts.unsent

    def close(self) -> None:
        self._server.close()
        self._relay.close()
        self._publisher.shutdown()
