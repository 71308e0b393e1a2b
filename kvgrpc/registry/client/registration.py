"""Keeps the rows of this process registered, for as long as it lives and whatever the registry does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

import grpc

from kvgrpc.errors import InvalidRequest, KvGrpcError, PeerUnreachable, StaleEpoch, StoreUnavailable
from kvgrpc.model import MAX_EPOCH, RankRef
from kvgrpc.observability.logging import one_line
from kvgrpc.registry import wire
from kvgrpc.registry.calls import domain_errors, pause_before, unreachable
from kvgrpc.registry.model import DEFAULT_TTL, RankRow
from kvgrpc.rpc.dialing.retry import may_repeat
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.within import within
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from kvgrpc.wire import rank_ref_to_pb

if TYPE_CHECKING:
    from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub

State = Literal["starting", "registered", "retrying", "superseded", "closed"]
STATES: tuple[str, ...] = get_args(State)

MAX_REQUEST_BYTES = 1 << 20
CALL_SECONDS = 5.0
CLOSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 5.0
# Whatever a registry says: it is asked each third of it.
SHORTEST_TTL, LONGEST_TTL = 0.3, 600.0

_KeepAliveCall = grpc.aio.StreamStreamCall[pb.KeepAliveRequest, pb.KeepAliveResponse]

_EPOCH_DIGITS = len(str(MAX_EPOCH))
_log = logging.getLogger(__name__)


class Registration:
    """The rows of this process at one registry: ``start`` once, ``close`` once, in between it looks after itself.

    ``address``: "host:port", or several with commas between them, of replicas that share a store: when one does not
    answer, the next is asked.

    It renews the leases at a third of their time to live over one stream, and registers again when the registry does
    not know a lease, was restarted, or the stream broke. It never gives up. All methods belong to one event loop; the
    properties may be read from any thread.

    ``open_channel`` is called anew after each break, so its channels should share no connection with others.
    ``on_superseded`` is called on that loop with the current epoch when a newer incarnation took a row over: the rank
    of that row was replaced and must stop. Other rows stay registered.
    """

    def __init__(
        self,
        open_channel: Callable[[str], grpc.aio.Channel],
        address: str,
        rows: Sequence[RankRow],
        *,
        on_superseded: Callable[[int], None] | None = None,
    ) -> None:
        self._addresses = deque(address.split(","))
        self._open_channel = open_channel
        self._channel: grpc.aio.Channel | None = None
        self._rows = list(rows)
        self._on_superseded = on_superseded
        self._pools = wire.PoolCache()
        self._leases: dict[int, RankRow] = {}
        # Rows of calls that got no answer, or whose store gave none: the registry may have them.
        self._doubtful: set[RankRef] = set()
        self._attempt = 0
        self._ttl = DEFAULT_TTL
        self._state: State = "starting"
        self._away_since = 0.0
        self._last_error: KvGrpcError | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """The address of the registry that looks after the rows now."""
        return self._addresses[0]

    @property
    def state(self) -> State:
        """The state: starting, registered, retrying (it comes back by itself), superseded (all rows), closed."""
        return self._state

    @property
    def away_seconds(self) -> float:
        """For how long it has been retrying; 0 in every other state. On its loop."""
        return asyncio.get_running_loop().time() - self._away_since if self._state == "retrying" else 0.0

    @property
    def last_error(self) -> str:
        """Why a call failed last; empty while none has."""
        return "" if self._last_error is None else str(self._last_error)

    @property
    def healthy(self) -> bool:
        """True while it looks after the rows; a registry that is away does not change that, being superseded does."""
        return self._task is not None and not self._task.done() and self._state in ("registered", "retrying")

    async def start(self, timeout: float) -> None:
        """Registers all rows, trying again for at most ``timeout`` seconds while the registry is down or asks to wait.

        Raises StaleEpoch (the metadata's currentEpoch + 1 would be accepted), RegistrationShapeConflict (code
        UNAVAILABLE if the other shape was still held by older incarnations at the end), AddressNotAllowed,
        InvalidRequest, PeerUnreachable, and what the server's front raises. Then nothing is registered, and a new
        Registration is needed.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            await self._register_until(deadline)
        except BaseException:
            await self.close()
            raise
        self._state = "registered"
        names = ", ".join(str(row.ref) for row in self._rows[:3])
        self._task = background(self._look_after(), f"registration {names}")

    async def close(self) -> None:
        """Stops, and deregisters within one second if the registry answers; otherwise the leases run out."""
        self._state = "closed"
        while self._task is not None and not self._task.done():
            self._task.cancel()  # again, because wait_for swallows one that meets its end (before Python 3.12)
            await asyncio.wait({self._task}, timeout=0.1)
        if self._leases or self._doubtful:
            with contextlib.suppress(KvGrpcError):
                await self._deregister()
            self._leases, self._doubtful = {}, set()
        await self._hang_up()

    async def _register_until(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            try:
                return await self._register(self._rows, min(CALL_SECONDS, max(deadline - loop.time(), 0.05)))
            except KvGrpcError as error:
                self._last_error = error
                pause = self._pause(attempt)
                if not may_repeat(error) or loop.time() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)
            await self._hang_up()
            attempt += 1

    async def _look_after(self) -> None:
        while self._rows:
            try:
                if self._state != "registered":
                    await self._register(self._rows, CALL_SECONDS)
                    self._on_registered_again()
                await self._keep_alive()
            except StaleEpoch as error:
                self._supersede(error)
                continue
            except KvGrpcError as error:
                self._note_failure(error)
            except Exception as error:
                _log.exception("looking after the registration at %s failed", self.address)
                self._note_failure(unreachable(self.address, type(error).__name__))
            await asyncio.sleep(self._pause(self._attempt))
            await self._hang_up()
            self._attempt += 1

    async def _keep_alive(self) -> NoReturn:
        """Renews until the stream ends, and raises why."""
        call = self._stub().KeepAlive()
        ended = asyncio.Event()
        call.add_done_callback(lambda _: ended.set())
        try:
            while True:
                with domain_errors(self.address):
                    unknown = await within(max(self._ttl / 3, 1.0), self._renew(call))
                # Not before: where every renewal is refused, ranks that register anew at once would be a storm.
                self._attempt = 0
                if unknown:
                    await self._register(unknown, CALL_SECONDS)
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(self._ttl / 3, ended.wait())
        finally:
            call.cancel()

    async def _renew(self, call: _KeepAliveCall) -> list[RankRow]:
        """One request and its answer: the rows whose leases the registry does not know."""
        if not call.done():
            await call.write(pb.KeepAliveRequest(lease_ids=self._leases))
        response = await call.read()  # the status of a call that has ended is raised here
        if not isinstance(response, pb.KeepAliveResponse):
            raise unreachable(self.address, "it ended the keepalive stream")
        self._ttl = _ttl(response)
        return [self._leases.pop(lease_id) for lease_id in response.unknown_lease_ids if lease_id in self._leases]

    async def _register(self, rows: Sequence[RankRow], timeout: float) -> None:
        for chunk, request in self._requests(rows):
            refs = {row.ref for row in chunk}
            try:
                with domain_errors(self.address):
                    response = await self._stub().Register(request, timeout=timeout)
            except (PeerUnreachable, StoreUnavailable, asyncio.CancelledError):
                self._doubtful |= refs
                raise
            self._ttl = _ttl(response)
            self._drop_leases(refs)
            try:
                self._leases |= self._told_apart(chunk, [lease.lease_id for lease in response.leases])
            except InvalidRequest:
                self._doubtful |= refs
                raise
            self._doubtful -= refs

    def _told_apart(self, rows: Sequence[RankRow], lease_ids: Sequence[int]) -> dict[int, RankRow]:
        """The rows by their leases. Raises InvalidRequest where those are not one a row: of two rows with one lease the
        first would be forgotten, and nobody would register it again."""
        where = f"in the answer of the registry at {self.address}"
        if len(lease_ids) != len(rows):
            raise InvalidRequest.of("leases", len(lease_ids), f"one a row, {len(rows)}, {where}")
        found: dict[int, RankRow] = {}
        for index, (lease_id, row) in enumerate(zip(lease_ids, rows, strict=True)):
            if lease_id in found or lease_id in self._leases:
                raise InvalidRequest.of(f"leases[{index}].lease_id", lease_id, f"no other row's, {where}")
            found[lease_id] = row
        return found

    def _requests(self, rows: Sequence[RankRow]) -> Iterator[tuple[list[RankRow], pb.RegisterRequest]]:
        """Requests that stay below the limits of the registry, each with its rows."""
        chunk: list[RankRow] = []
        request, size = pb.RegisterRequest(), 0
        for row in rows:
            message = wire.row_to_pb(row, self._pools)
            size += message.ByteSize()
            if chunk and (size > MAX_REQUEST_BYTES or len(chunk) == wire.MAX_ROWS_PER_REQUEST):
                yield chunk, request
                chunk, request, size = [], pb.RegisterRequest(), message.ByteSize()
            chunk.append(row)
            request.rows.append(message)
        if chunk:
            yield chunk, request

    async def _deregister(self) -> None:
        refs = list({row.ref for row in self._leases.values()} | self._doubtful)
        requests = [
            pb.DeregisterRequest(ranks=map(rank_ref_to_pb, refs[first : first + wire.MAX_ROWS_PER_REQUEST]))
            for first in range(0, len(refs), wire.MAX_ROWS_PER_REQUEST)
        ]
        with domain_errors(self.address):
            calls = [self._stub().Deregister(request, timeout=CLOSE_SECONDS) for request in requests]
            await asyncio.gather(*calls)

    def _supersede(self, error: StaleEpoch) -> None:
        rank = error.metadata.get("rank")
        gone = [row for row in self._rows if str(row.ref.rank) == rank] or self._rows
        self._rows = [row for row in self._rows if row not in gone]
        self._drop_leases({row.ref for row in gone})
        self._last_error = error
        if self._state == "registered":
            self._away_since = asyncio.get_running_loop().time()
        self._state = "retrying" if self._rows else "superseded"
        _log.warning("%s is superseded: %s", ", ".join(str(row.ref) for row in gone), one_line(error.message))
        if self._on_superseded is not None:
            try:
                self._on_superseded(newer_epoch(error) or 0)
            except Exception:
                _log.exception("on_superseded failed")

    def _drop_leases(self, refs: Set[RankRef]) -> None:
        self._leases = {lease_id: row for lease_id, row in self._leases.items() if row.ref not in refs}

    def _on_registered_again(self) -> None:
        self._state = "registered"
        away = asyncio.get_running_loop().time() - self._away_since
        _log.info("registered at %s again after %.1f s", self.address, away)

    def _note_failure(self, error: KvGrpcError) -> None:
        if self._state == "registered":
            self._away_since = asyncio.get_running_loop().time()
            _log.warning("registering at %s again: %s", self.address, one_line(str(error)))
        self._state, self._last_error = "retrying", error

    def _pause(self, attempt: int) -> float:
        return pause_before(
            attempt, min(1.0, self._ttl / 10), min(self._ttl / 3, LONGEST_PAUSE_SECONDS), self._last_error
        )

    def _stub(self) -> RegistryServiceAsyncStub:
        if self._channel is None:
            self._channel = self._open_channel(self.address)
        return RegistryServiceStub(self._channel)

    async def _hang_up(self) -> None:
        """The next attempt dials anew, and the next replica: it must not inherit how long a channel waits between its
        own attempts.
        """
        self._addresses.rotate(-1)
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


def newer_epoch(error: KvGrpcError) -> int | None:
    """The epoch of the newer incarnation that a registry named when it refused a row; None too for one that no epoch
    can follow."""
    text = error.metadata.get("currentEpoch", "")
    epoch = int(text) if text.isascii() and text.isdigit() and len(text) <= _EPOCH_DIGITS else 0
    return epoch if 0 < epoch < MAX_EPOCH else None


def _ttl(response: pb.RegisterResponse | pb.KeepAliveResponse) -> float:
    """In seconds, within reason; the usual one where the registry names none."""
    said = response.ttl.ToMicroseconds() / 1e6
    return min(max(said, SHORTEST_TTL), LONGEST_TTL) if said > 0 else DEFAULT_TTL
