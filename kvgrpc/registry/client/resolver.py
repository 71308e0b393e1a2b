"""Asks registries for engines, on behalf of whoever needs a peer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from kvgrpc.errors import EngineNotFound, KvGrpcError, PeerUnreachable
from kvgrpc.model import Role
from kvgrpc.registry import wire
from kvgrpc.registry.calls import domain_errors, is_refusal, pause_before, unreachable
from kvgrpc.registry.model import RankSelector, ResolvedEngine, absent
from kvgrpc.rpc.dialing.channels import ChannelPool
from kvgrpc.rpc.dialing.retry import may_repeat
from kvgrpc.rpc.turns import in_pieces
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0
# An answer that comes this long before the end of the question is not worth another round.
LEAST_SECONDS_TO_ASK_AGAIN = 0.5


@dataclass(frozen=True, slots=True)
class _Question:
    address: str
    engine: str
    role: Role
    selectors: tuple[RankSelector, ...]
    wait_ready: bool
    with_pools: bool
    refused_for: float


class Resolver:
    """Finds the ranks of an engine at a registry. Equal questions that are open at one time are asked once.

    Nothing is kept: each question that nobody else has open goes to the registry. One channel per registry. All methods
    belong to one event loop.
    """

    def __init__(self, open_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._channels = ChannelPool(open_channel)
        self._pending: dict[_Question, _Pending] = {}
        self._pools = wire.PoolCache()

    async def resolve(
        self,
        address: str,
        engine: str,
        role: Role,
        selectors: Sequence[RankSelector] = (),
        timeout: float = 10.0,
        wait_ready: bool = True,
        with_pools: bool = False,
        refused_for: float = math.inf,
    ) -> ResolvedEngine:
        """The engine with the rows that any of the selectors fits (none: only the engine); their pools only
        where ``with_pools`` says so.

        ``engine`` may be empty when the registry has exactly one of the role. With ``wait_ready`` it waits until every
        rank is registered. A registry that is down or warming up is asked again until ``timeout`` seconds are over, but
        not longer than its address has refused for ``refused_for`` seconds.
        Raises EngineNotFound, WarmingUp, PeerUnreachable, InvalidRequest and what a server's front raises.
        """
        question = _Question(address, engine, role, tuple(selectors), wait_ready, with_pools, refused_for)
        pending = self._pending.get(question)
        if pending is None:
            pending = self._pending[question] = _Pending(self, question, timeout)
        return await pending.join(timeout)

    async def close(self) -> None:
        """Ends open questions, whose callers get PeerUnreachable, and closes the channels."""
        for pending in list(self._pending.values()):
            pending.cancel()
        await self._channels.close()

    async def ask(self, question: _Question, timeout: float) -> ResolvedEngine:
        """One call. Its rows are read in pieces: they may be thousands."""
        request = pb.ResolveRanksRequest(
            engine=question.engine,
            role=common_pb2.Role.ValueType(question.role),
            selectors=[wire.selector_to_pb(selector) for selector in question.selectors],
            wait_ready=question.wait_ready,
            without_pools=not question.with_pools,
        )
        channel = self._channels.get(question.address)
        self._channels.trim({pending.address for pending in self._pending})
        with domain_errors(question.address):
            response = await RegistryServiceStub(channel).ResolveRanks(request, timeout=timeout)
        engine = response.engine
        pools = self._pools if question.with_pools else None
        return wire.engine_of(engine, await in_pieces(wire.engine_rows(engine, pools)))

    def forget(self, question: _Question, pending: _Pending) -> None:
        if self._pending.get(question) is pending:
            del self._pending[question]

    def redial(self, question: _Question) -> None:
        """Unless the channel stands and another question goes over it."""
        alone = all(other.address != question.address for other in self._pending if other != question)
        if alone or not self.is_connected(question.address):
            self._channels.redial(question.address)

    def is_connected(self, address: str) -> bool:
        return self._channels.is_connected(address)


class _Pending:
    """One open question and those who wait for its answer, each with a timeout of its own."""

    def __init__(self, resolver: Resolver, question: _Question, timeout: float) -> None:
        self._resolver = resolver
        self._question = question
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + timeout
        self._error: KvGrpcError | None = None
        self._callers = 0
        self._task = self._loop.create_task(self._ask_until_answered(), name=f"resolve {question.address}")
        self._task.add_done_callback(self._on_done)

    async def join(self, timeout: float) -> ResolvedEngine:
        self._deadline = max(self._deadline, self._loop.time() + timeout)
        self._callers += 1
        try:
            answered, _ = await asyncio.wait({self._task}, timeout=timeout)
            if not answered:
                raise self._error or self._no_answer(timeout)
            if self._task.cancelled():
                raise unreachable(self._question.address, "the resolver was closed")
            return self._task.result()
        finally:
            self._callers -= 1
            if not self._callers:
                self.cancel()

    def cancel(self) -> None:
        self._resolver.forget(self._question, self)
        self._task.cancel()

    async def _ask_until_answered(self) -> ResolvedEngine:
        attempt, now = 0, self._loop.time
        refused_since = math.inf
        while True:
            try:
                return await self._resolver.ask(self._question, self._remaining())
            except KvGrpcError as error:
                self._error = error
                if isinstance(error, PeerUnreachable):
                    self._resolver.redial(self._question)
                refused_since = min(refused_since, now()) if is_refusal(error) else math.inf
                pause = pause_before(attempt, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, error)
                is_gone = now() - refused_since >= self._question.refused_for
                if is_gone or not self._worth_asking_again(error) or pause >= self._remaining():
                    raise
            attempt += 1
            await asyncio.sleep(pause)

    def _worth_asking_again(self, error: KvGrpcError) -> bool:
        if isinstance(error, EngineNotFound) and self._question.wait_ready:
            # The registry waited for the first caller; one that came later has more time.
            return self._remaining() > LEAST_SECONDS_TO_ASK_AGAIN
        return may_repeat(error)

    def _remaining(self) -> float:
        return self._deadline - self._loop.time()

    def _no_answer(self, timeout: float) -> KvGrpcError:
        """A call is under way that has more time than this caller: either it waits for READY, or for the registry."""
        asked = self._question
        if not self._resolver.is_connected(asked.address) or not asked.wait_ready:
            return unreachable(asked.address, f"no answer within {timeout:g} s")
        return EngineNotFound(
            f"{absent(asked.engine, asked.role, 'READY')} at {asked.address} after {timeout:g} s",
            metadata={"engine": asked.engine, "role": asked.role.name, "missingRanks": "unknown"},
        )

    def _on_done(self, task: asyncio.Task[ResolvedEngine]) -> None:
        self._resolver.forget(self._question, self)
        if not task.cancelled():
            task.exception()  # callers that timed out do not look at it
