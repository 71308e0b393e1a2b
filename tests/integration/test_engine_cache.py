"""A cache that an engine keeps itself, served beside it: found by the engine's name, and open to routers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvgrpc.client import ClientSecurity, SyncClient
from kvgrpc.errors import EngineNotFound, FeatureDisabled, PermissionDenied, StaleEpoch, TooManyRequests
from kvgrpc.hashing import page_hashes
from kvgrpc.model import MAX_EPOCH, ModelIdentity, RankRef, Role, Tier
from kvgrpc.prefetch.model import (
    CacheFacts,
    Namespace,
    OperationKind,
    OperationState,
    PrefetchLimits,
    Purged,
    Stop,
    TierUse,
)
from kvgrpc.prefetch.orders import EngineOrders
from kvgrpc.prefetch.protocol.book import OperationBook
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.registry.model import Lease, RankRow
from kvgrpc.registry.store.memory import MemoryStore
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.security import CallerRole, ServerSecurity, Token
from kvgrpc.server import CacheServer, RankConfig, RegistryServer, open_cache
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import prefetch_service_pb2 as pb
from tests.support.waiting import wait_until

PAGE_TOKENS = 4
TOKENS = (
    Token(CallerRole.CONSUMER, "the-secret-of-router-a-0123456789", "router-a"),
    Token(CallerRole.CONSUMER, "the-secret-of-router-b-0123456789", "router-b"),
    Token(CallerRole.RANK, "the-secret-of-engines-01234567890", "*"),
)


class SteppingEngine:
    """An engine that does what is ordered when it steps: its tests say when."""

    leader = None
    role = Role.UNIFIED
    healthy = True
    pinnable = None

    def __init__(self, rank: RankRef, limits: PrefetchLimits) -> None:
        self.rank = rank
        self.namespace = Namespace("tiny", "float32", "engine", PAGE_TOKENS)
        self.woken = threading.Event()
        self.orders = EngineOrders(limits, PAGE_TOKENS, self.woken.set)
        self.host: set[str] = set()

    @property
    def limits(self) -> PrefetchLimits:
        return self.orders.limits

    @property
    def book(self) -> OperationBook:
        return self.orders.book

    def step(self) -> Operation | None:
        """Takes one order, and brings all of it."""
        operation = self.orders.take()
        if operation is not None:
            self.orders.tell(operation, state=OperationState.TRANSFERRING, hit=len(operation.hashes))
            self.host.update(operation.hashes)
            self.orders.tell(operation, agreed=len(operation.hashes), completed=len(operation.hashes))
            self.orders.end(operation, OperationState.DONE)
        return operation

    def hash_tokens(
        self, tokens: Sequence[int], *, extra_key: str | None, cache_salt: str | None, bigram: bool
    ) -> list[bytes]:
        return page_hashes(tokens, PAGE_TOKENS, after=b"an engine's own seed")

    def lookup(
        self, hashes: Sequence[str], timeout: float, *, extra_key: str = "", storage: bool = True
    ) -> tuple[int, int, int]:
        there = next((n for n, each in enumerate(hashes) if each not in self.host), len(hashes))
        return 0, there, len(hashes)

    def start(self, order: Order) -> Operation:
        if order.kind is OperationKind.BACKUP:
            raise FeatureDisabled("no backup here", metadata={"feature": "backup", "howToEnable": "nothing"})
        return self.orders.start(order)

    def began(self, kind: OperationKind, request_id: str) -> Operation | None:
        return self.orders.began(kind, request_id)

    def terminate(self, operation: Operation) -> None:
        self.orders.terminate(operation)

    def use(self) -> list[TierUse]:
        return [TierUse(Tier.HOST, 64, len(self.host), 0, 4096)]

    def facts(self) -> CacheFacts:
        return CacheFacts(storage="file")

    def purge(self, tiers: Sequence[Tier], extra_key: str | None, *, dry_run: bool, timeout: float) -> Purged:
        raise FeatureDisabled("no purge here", metadata={"feature": "purge", "howToEnable": "nothing"})

    def pin(self, hashes: Sequence[str], seconds: float) -> int:
        raise FeatureDisabled("no pin here", metadata={"feature": "pin", "howToEnable": "nothing"})

    def drain(self) -> None:
        self.orders.drain()

    def undrain(self) -> None:
        self.orders.undrain()


@contextmanager
def served(
    security: ServerSecurity | None = None, client: ClientSecurity | None = None, operations: int = 64
) -> Iterator[tuple[CacheServer, SteppingEngine, str]]:
    """The server, its engine, and the registry's address."""
    registry = RegistryServer(["127.0.0.1:0"], security).open()
    made: list[SteppingEngine] = []

    def make(rank: RankRef) -> SteppingEngine:
        made.append(SteppingEngine(rank, PrefetchLimits(threshold_tokens=PAGE_TOKENS, operations=operations)))
        return made[0]

    config = RankConfig(
        engine="P0",
        role=Role.UNIFIED,
        pools=(),
        model=ModelIdentity("tiny"),
        registry=registry.address,
        server_security=security or ServerSecurity(),
        client_security=client or ClientSecurity(),
    )
    server = open_cache(config, make)
    try:
        deadline = time.monotonic() + 10
        while not server.registered:
            assert time.monotonic() < deadline, "the cache is not registered"
            time.sleep(0.02)
        yield server, made[0], registry.address
    finally:
        server.close()
        made[0].orders.shut_down()
        registry.close()


def prompt(pages: int, first: int = 0) -> pb.PromptPages:
    return pb.PromptPages(tokens=range(first, first + pages * PAGE_TOKENS))


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvgrpc", *words], capture_output=True, text=True, timeout=60)


def test_a_drained_cache_that_serves_again_is_at_the_registry_again() -> None:
    with served() as (server, _, registry), SyncClient(server.address) as client, SyncClient(registry) as known:
        client.drain(0.0)
        assert not known.list_engines() and not server.registered
        client.undrain()
        wait_until(lambda: [engine.name for engine in known.list_engines()] == ["P0"])
        assert client.health() == "SERVING"


class AlwaysNewer(MemoryStore):
    """Whatever registers, there is a newer incarnation. ``said``: of which epoch, the one that was asked for or a text
    that is none."""

    def __init__(self, said: str) -> None:
        super().__init__()
        self.said, self.asked = said, 0

    async def register(self, rows: Sequence[RankRow]) -> Sequence[Lease]:
        self.asked += 1
        epoch = self.said or rows[0].ref.epoch
        raise StaleEpoch("there is a newer one", metadata={"rank": rows[0].ref.rank, "currentEpoch": epoch})


@pytest.mark.parametrize(
    "said",
    ["", "9" * 5000, "9" * 30, "9" * 19, str(MAX_EPOCH), "\u00b2"],
    ids=["an epoch", "digits", "large", "no epoch", "the last", "no digit"],
)
def test_a_registry_that_always_knows_a_newer_incarnation_is_not_asked_without_a_pause(said: str) -> None:
    """The loop that moves hand-offs did little else; and what was no epoch ended the cache's registration for good."""
    store = AlwaysNewer(said)
    registry = RegistryServer(["127.0.0.1:0"], store=store).open()
    config = RankConfig(
        engine="P0", role=Role.UNIFIED, pools=(), model=ModelIdentity("tiny"), registry=registry.address
    )
    server = open_cache(config, lambda rank: SteppingEngine(rank, PrefetchLimits(threshold_tokens=PAGE_TOKENS)))
    try:
        wait_until(lambda: store.asked)
        time.sleep(0.5)  # a while in which it must not be asked often
        assert store.asked <= 2 and LoopThread.shared().healthy
        assert server.rank.epoch <= MAX_EPOCH, "no registry would take it any more"
    finally:
        server.close()
        registry.close()


def test_an_order_by_the_engines_name_is_done_when_the_engine_steps() -> None:
    with served() as (_, engine, registry):
        began = threading.Thread(target=lambda: engine.woken.wait(30) and engine.step())
        began.start()
        words = ("prefetch", "start", "-s", registry, "--engine", "P0", "--json", "--tokens", "0 1 2 3 4 5 6 7")
        found = command(*words)
        began.join()
        assert found.returncode == 0, found.stderr
        last = json.loads(found.stdout.splitlines()[-1])
        assert (last["state"], last["completedPages"]) == ("OPERATION_STATE_DONE", 2)
        looked = command("prefetch", "lookup", "-s", registry, "--engine", "P0", "--json", "--tokens", "0 1 2 3")
        assert json.loads(looked.stdout)["hostPages"] == 1


def test_an_engine_that_nobody_knows_is_named() -> None:
    with served() as (_, _, registry):
        found = command("prefetch", "start", "-s", registry, "--engine", "P7", "--tokens", "0 1 2 3")
        assert found.returncode != 0 and "P7" in found.stderr
        with SyncClient(registry) as client, pytest.raises(EngineNotFound, match="P7"):
            client.get_engine("P7")


def test_a_router_has_its_share_and_ends_only_what_it_began() -> None:
    security = ServerSecurity(tokens=TOKENS)
    ranks = ClientSecurity(token=TOKENS[2].secret)
    with served(security, ranks, operations=8) as (server, engine, _):
        first = SyncClient(server.address, ClientSecurity(token=TOKENS[0].secret))
        second = SyncClient(server.address, ClientSecurity(token=TOKENS[1].secret))
        with first, second:
            mine = [first.start_prefetch(prompt(2, 100 * n)) for n in range(2)]
            with pytest.raises(TooManyRequests):
                first.start_prefetch(prompt(2, 900))
            theirs = second.start_prefetch(prompt(2, 500))
            with pytest.raises(PermissionDenied):
                first.terminate_prefetch(theirs.operation_id)
            with pytest.raises(PermissionDenied):
                first.start_backup(prompt(2))
            ended = first.terminate_prefetch(mine[0].operation_id)
            assert (ended.state, ended.stop) == (pb.OPERATION_STATE_CANCELLED, pb.OPERATION_STOP_CANCELLED)
            first.start_prefetch(prompt(2, 900))
        assert [engine.step() is not None for _ in range(4)] == [True, True, True, False]


def test_an_order_that_the_engine_never_takes_expires() -> None:
    with served() as (server, engine, _), SyncClient(server.address) as client:
        operation = client.start_prefetch(prompt(2), timeout=0.05)
        time.sleep(0.1)  # longer than the order may take: its subject
        assert engine.step() is None
        (ended,) = client.list_operations()
        assert ended.operation_id == operation.operation_id
        assert (ended.state, ended.stop) == (OperationState.EXPIRED, Stop.DEADLINE)


def test_what_became_of_the_pages_is_told() -> None:
    with served() as (server, engine, _), SyncClient(server.address) as client:
        client.start_prefetch(prompt(3))
        operation = engine.step()
        assert operation is not None
        engine.orders.tell(operation, used=2, wasted=1)
        (told,) = client.list_operations()
        assert (told.used_pages, told.wasted_pages) == (2, 1)


def test_what_an_engine_cannot_do_is_refused_by_name_and_the_port_goes_on() -> None:
    with served() as (server, _, _), SyncClient(server.address) as client:
        for call in (lambda: client.pin_pages(prompt(1), 1.0), lambda: client.start_backup(prompt(1))):
            with pytest.raises(FeatureDisabled):
                call()
        info = client.get_cache_info()
        assert (info.storage_backend, info.cache_namespace.layout, info.tiers[0].pages) == ("file", "engine", 64)
        with pytest.raises(FeatureDisabled):
            client.purge_pages(pb.PurgePagesRequest(cache_namespace=info.cache_namespace, tiers=[common_pb2.TIER_HOST]))
