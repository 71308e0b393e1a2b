"""The Python driver: ``python -m tests.conformance.scenarios.driver``. README.md says what a driver is."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvgrpc.client import Client, ClientSecurity, EventFollower
from kvgrpc.client.engine_mirror import EngineMirror
from kvgrpc.errors import KvGrpcError
from kvgrpc.events.following.messages import FollowerState
from kvgrpc.model import Layout, ModelIdentity, RankId, RankRef, Role
from kvgrpc.registry.client.registration import Registration
from kvgrpc.registry.model import Endpoints, RankRow
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.dialing.retry import may_repeat
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import index_service_pb2 as index_pb
from kvgrpc.v1 import prefetch_service_pb2 as prefetch_pb
from kvgrpc.v1 import registry_service_pb2 as registry_pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from tests.support.waiting import until

WITHIN_MS = 20_000
CALL_SECONDS = 10.0
Command = dict[str, Any]


async def main() -> None:
    driver = Driver()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(await driver.answer(json.loads(line)), flush=True)
    await driver.close_all()


class Driver:
    """What commands named, and one method for each ``op``."""

    def __init__(self) -> None:
        self._registrations: dict[str, tuple[Registration, list[int]]] = {}
        self._watches: dict[str, tuple[EngineMirror, asyncio.Task[None]]] = {}
        self._followers: dict[str, Followed] = {}
        self._operations: dict[str, tuple[Client, str]] = {}
        self._clients: dict[str, Client] = {}

    async def answer(self, command: Command) -> str:
        try:
            act: Callable[[Command], Awaitable[str]] = getattr(self, command["op"])
            return await asyncio.wait_for(act(command), command.get("within_ms", WITHIN_MS) / 1000)
        except asyncio.TimeoutError:
            return "timeout"
        except grpc.aio.AioRpcError as error:
            return refusal(error_from(error))
        except KvGrpcError as error:
            return refusal(error)

    async def close_all(self) -> None:
        for name in [*self._registrations, *self._watches, *self._followers]:
            await self.close({"as": name})
        for client in self._clients.values():
            await client.close()

    # The registry.

    async def register(self, command: Command) -> str:
        newer: list[int] = []
        registration = Registration(
            lambda address: open_channel(address, security_of(command), own_connection=True),
            command["address"],
            [row_of(row) for row in command["rows"]],
            on_superseded=newer.append,
        )
        self._registrations[command["as"]] = registration, newer
        await registration.start(CALL_SECONDS)
        return "registered"

    async def state(self, command: Command) -> str:
        registration, newer = self._registrations[command["as"]]
        await until(lambda: registration.state == command["state"])
        return f"superseded epoch={newer[-1]}" if newer else registration.state

    async def get_engine(self, command: Command) -> str:
        return engine_line(await self._client(command).get_engine(command["engine"]))

    async def refuse(self, command: Command) -> str:
        """Once: a client would ask again where it may."""
        request = registry_pb.GetEngineRequest(engine=command["engine"])
        async with open_channel(command["address"], security_of(command), own_connection=True) as channel:
            answer = await RegistryServiceStub(channel).GetEngine(request, timeout=CALL_SECONDS)
        return engine_line(answer.engine)

    async def resolve_ranks(self, command: Command) -> str:
        async with Client(command["address"], security_of(command), command["timeout_ms"] / 1000) as client:
            role = common_pb2.Role.Value(f"ROLE_{command['role']}")
            every = [registry_pb.RankSelector()]
            return engine_line(await client.resolve_ranks(command["engine"], role, every, command["wait_ready"]))

    async def list_engines(self, command: Command) -> str:
        return ", ".join(map(head_line, await self._client(command).list_engines())) or "-"

    async def watch_engines(self, command: Command) -> str:
        mirror, client = EngineMirror(), self._client(command)

        async def watch() -> None:
            async for message in client.watch_engines():
                mirror.apply(message)

        self._watches[command["as"]] = mirror, asyncio.create_task(watch())
        return "watching"

    async def until_engine(self, command: Command) -> str:
        mirror, _ = self._watches[command["as"]]
        name, ranks = command["engine"], command["ranks"]

        def told() -> bool:
            engine = mirror.engine(name)
            return mirror.complete and (engine.registered_ranks if engine is not None else 0) == ranks

        await until(told)
        engine = mirror.engine(name)
        return head_line(engine) if engine is not None else f"{name} gone"

    # Events.

    async def follow(self, command: Command) -> str:
        follower = EventFollower(command["address"], security=security_of(command))
        await follower.start()
        self._followers[command["as"]] = Followed(follower)
        return "following"

    async def until_current(self, command: Command) -> str:
        followed = self._followers[command["as"]]
        follower, exact = followed.follower, (FollowerState.CURRENT, FollowerState.DOUBTFUL)
        await until(lambda: follower.state in exact and follower.freshness.next_sequence == int(command["next"]))
        return followed.contents()

    async def until_failed(self, command: Command) -> str:
        followed = self._followers[command["as"]]
        await until(lambda: followed.follower.counts.failures > followed.failures)
        return f"failed {followed.contents()}"

    async def counts(self, command: Command) -> str:
        counts = self._followers[command["as"]].follower.counts
        return f"snapshots={counts.snapshots} logs={counts.new_logs + 1} different={counts.digests_different}"

    async def holds(self, command: Command) -> str:
        media = self._followers[command["as"]].follower.media_of(int(command["hash"]))
        return str(command["medium"] in media).lower()

    async def close(self, command: Command) -> str:
        name = command["as"]
        if name in self._registrations:
            await self._registrations.pop(name)[0].close()
        elif name in self._watches:
            self._watches.pop(name)[1].cancel()
        else:
            await self._followers.pop(name).follower.close()
        return "closed"

    # The index.

    async def score(self, command: Command) -> str:
        request = index_pb.ScoreRequest(
            prompts=[prompt_of(command)], engines=command.get("engines", ()), max_scores=command.get("max_scores", 0)
        )
        answer = await self._client(command).score(request)
        return ", ".join(map(score_line, answer.prompts[0].scores)) or "-"

    async def plan(self, command: Command) -> str:
        prompt = index_pb.PlanPrompt(prompt=prompt_of(command), engines=command.get("engines", ()))
        request = index_pb.PlanRequest(prompts=[prompt], max_placements=command.get("max_placements", 0))
        answer = await self._client(command).plan(request)
        return ", ".join(map(placement_line, answer.plans[0].placements)) or "-"

    # The hierarchical cache.

    async def lookup(self, command: Command) -> str:
        found = await self._client(command).lookup(pages_of(command))
        return (
            f"asked={found.asked_pages} device={found.device_pages} host={found.host_pages} "
            f"storage={found.storage_pages} page={found.page_tokens}"
        )

    async def start_prefetch(self, command: Command) -> str:
        client = self._client(command)
        operation = await client.start_prefetch(pages_of(command), request_id=command["request_id"])
        self._operations[command["as"]] = client, operation.operation_id
        return "started"

    async def until_ended(self, command: Command) -> str:
        client, operation_id = self._operations[command["as"]]
        operation = prefetch_pb.CacheOperation()
        async for message in client.watch_operations([operation_id]):
            operation = next(iter(message.operations), operation)
        return operation_line(operation)

    async def terminate_prefetch(self, command: Command) -> str:
        client, operation_id = self._operations[command["as"]]
        return operation_line(await client.terminate_prefetch(operation_id))

    def _client(self, command: Command) -> Client:
        address = command["address"]
        if address not in self._clients:
            self._clients[address] = Client(address, security_of(command))
        return self._clients[address]


@dataclass
class Followed:
    """A follower, and how many failures it had when it was last told of."""

    follower: EventFollower
    failures: int = field(default=0)

    def contents(self) -> str:
        fresh = self.follower.freshness
        doubtful = self.follower.state is FollowerState.DOUBTFUL
        self.failures = self.follower.counts.failures
        blocks = joined(f"{medium}:{count}" for medium, count in sorted(self.follower.blocks.items()) if count)
        told = f"whole={fresh.whole} doubtful={doubtful}".lower()
        return f"next={fresh.next_sequence} blocks={blocks} {told}"


def security_of(command: Command) -> ClientSecurity:
    return ClientSecurity(ca_file=command.get("ca", ""), token=command.get("secret", ""))


def row_of(row: Command) -> RankRow:
    return RankRow(
        ref=RankRef(RankId(row["engine"], dp=row.get("dp", 0)), int(row["epoch"])),
        role=Role[row["role"]],
        endpoints=Endpoints(grpc=row["grpc"]),
        layout=Layout(dp=row.get("dp_size", 1)),
        data_plane="shm",
        model=ModelIdentity(name=row.get("model", "")),
    )


def prompt_of(command: Command) -> index_pb.ScorePrompt:
    hashes = index_pb.BlockHashes(values=[int(each) for each in command["hashes"]])
    return index_pb.ScorePrompt(block_hashes=hashes, model=command.get("model", ""))


def pages_of(command: Command) -> prefetch_pb.PromptPages:
    first = command["first_token"]
    return prefetch_pb.PromptPages(tokens=range(first, first + command["tokens"]))


def head_line(engine: registry_pb.Engine) -> str:
    return f"{engine.name} {engine.registered_ranks}/{engine.expected_ranks} {'ready' if engine.ready else 'waiting'}"


def engine_line(engine: registry_pb.Engine) -> str:
    name, head = engine.name, head_line(engine).removeprefix(engine.name)
    rows = joined(f"{at(row.rank.rank)}@{row.rank.epoch}" for row in engine.rows)
    role = common_pb2.Role.Name(engine.role).removeprefix("ROLE_")
    return f"{name} {role}{head} rows={rows} missing={joined(at(rank) for rank in engine.missing_ranks)}"


def at(rank: common_pb2.RankId) -> str:
    return f"{rank.dp}.{rank.pp}.{rank.cp}.{rank.tp}"


def score_line(score: index_pb.CacheScore) -> str:
    return (
        f"{score.engine}/{score.dp} device={score.device_blocks} host={score.host_blocks} disk={score.disk_blocks} "
        f"blocks={score.blocks} page={score.page_tokens}"
    )


def placement_line(placement: index_pb.Placement) -> str:
    pull = placement.pull.engine if placement.HasField("pull") else "-"
    return (
        f"{placement.engine}/{placement.dp} device={placement.device_blocks} host={placement.host_blocks} "
        f"blocks={placement.blocks} page={placement.page_tokens} compute={placement.compute_tokens} pull={pull}"
    )


def operation_line(operation: prefetch_pb.CacheOperation) -> str:
    state = prefetch_pb.OperationState.Name(operation.state).removeprefix("OPERATION_STATE_")
    stop = prefetch_pb.OperationStop.Name(operation.stop).removeprefix("OPERATION_STOP_")
    counts = f"asked={operation.asked_pages} covered={operation.covered_pages} completed={operation.completed_pages}"
    return f"{state} stop={stop if operation.stop else '-'} {counts} quiescent={str(operation.quiescent).lower()}"


def refusal(error: KvGrpcError) -> str:
    retry = "-" if error.retry_after is None else f"{error.retry_after * 1000:.0f}"
    # Ours, and no server's: which code a status without a reason had, and what a reason is called that is not known.
    own = () if error.reason else ("grpcCode", "reason")
    metadata = [f" {key}={value}" for key, value in sorted(error.metadata.items()) if key not in own]
    may = f"retry={retry} repeat={may_repeat(error)}".lower()
    return f"refused {error.code} {error.reason.name} {may}{''.join(metadata)}"


def joined(parts: Iterable[str]) -> str:
    return ",".join(parts) or "-"


if __name__ == "__main__":
    asyncio.run(main())
