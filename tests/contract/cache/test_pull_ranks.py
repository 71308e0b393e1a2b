"""Pulls of an engine that keeps its cache itself and runs in several ranks: each lends and takes beside the others."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.engines.sglang.cache.stored import StoredPages
from kvgrpc.errors import FeatureDisabled
from kvgrpc.events import BlockStored, KVEventBatch, open_publisher
from kvgrpc.events.log.digest import hash_key
from kvgrpc.hashing import sglang_event_hash
from kvgrpc.model import Layout, RankId, RankRef, Role, new_epoch
from kvgrpc.prefetch.storage.base import OK
from kvgrpc.prefetch.storage.keys import KeyMode, Keys, PageIdentity
from kvgrpc.pull.lending.exported import ExportedPages
from kvgrpc.pull.lending.lender import LentPages
from kvgrpc.pull.model import PullConfig
from kvgrpc.pull.taking.peers import PeersBackend
from kvgrpc.server import EventServer, IndexServer, RankConfig, RegistryServer, open_cache
from kvgrpc.v1 import index_service_pb2 as index_pb
from kvgrpc.v1 import prefetch_service_pb2 as proto
from tests.support.cache_serving import hashes_of, prompt
from tests.support.waiting import wait_until

PAGE_BYTES = 4096
# A busy machine may send nothing for seconds.
PULL = PullConfig(staging_pages=16, answer_timeout=5.0, stall_timeout=8.0)
SECONDS = 20.0


class Rank:
    """One that takes no orders. ``writes``: False where another one has the same bytes, and writes for both."""

    def __init__(
        self, engine: str, registry: str, tp: int, size: int, replicated: bool = False, writes: bool = True
    ) -> None:
        identity = PageIdentity(
            model="m", dtype="float16", layout="x", page_size=4, tp_rank=tp, tp_size=size, replicated=replicated
        )
        self.tp, self.replicated = tp, replicated
        self.cache, self.backend = ExportedPages(16, PAGE_BYTES), PeersBackend(None)
        self.keys = Keys(KeyMode.KVGRPC, identity)
        lends = LentPages(self.cache, self.keys, PAGE_BYTES, 4, "float16", fills=writes)
        config = RankConfig(
            engine=engine,
            role=Role.UNIFIED,
            pools=(),
            data_plane="shm",
            registry=registry,
            layout=Layout(tp=size),
            tp=tp,
            pull=PULL,
            prefill_tokens_per_second=1.0,
        )
        self.server = open_cache(config, None, (lends, self.backend))

    def page(self, page_hash: str) -> bytes:
        """As this rank has it."""
        rank = bytes([0 if self.replicated else self.tp])
        return (rank + bytes.fromhex(page_hash) * (PAGE_BYTES // 32))[:PAGE_BYTES]

    def writes(self, hashes: Sequence[str]) -> None:
        for each in hashes:
            page = ctypes.create_string_buffer(self.page(each), PAGE_BYTES)
            self.cache.offer([each], [((ctypes.addressof(page), PAGE_BYTES),)])

    def takes(self, hashes: Sequence[str]) -> None:
        """All of them, with its own bytes."""
        names = self.keys.of_all(hashes)
        wait_until(lambda: self.backend.count_leading(names, SECONDS) == len(hashes), SECONDS)
        pages = [ctypes.create_string_buffer(PAGE_BYTES) for _ in hashes]
        buffers = [((ctypes.addressof(page), PAGE_BYTES),) for page in pages]
        assert self.backend.read(names, buffers, SECONDS) == [OK] * len(hashes)
        assert [page.raw for page in pages] == [self.page(each) for each in hashes]


@pytest.fixture
def registry() -> Iterator[str]:
    server = RegistryServer(["127.0.0.1:0"]).open()
    yield server.address
    server.close()


@pytest.fixture
def engines(registry: str) -> Iterator[Any]:
    """Opens the ranks of an engine, which close with the test."""
    with ExitStack() as closing:

        def open_all(name: str, size: int, replicated: bool = False) -> list[Rank]:
            found = []
            for tp in range(size):
                found.append(Rank(name, registry, tp, size, replicated, not (replicated and tp)))
                closing.callback(found[-1].server.close)
            return found

        yield open_all


def test_each_rank_takes_its_own_share_and_serves_pulls_alone(engines: Any) -> None:
    holder, taker = engines("holder", 2), engines("taker", 2)
    hashes = hashes_of(prompt(6))
    for rank in holder:
        rank.writes(hashes)
    for rank in taker:
        rank.takes(hashes)
    with SyncClient(taker[1].server.address) as client:
        assert set(client.get_server_info().services) == {"kvgrpc.v1.PullService", "kvgrpc.v1.ServerService"}
        assert client.health() and client.list_pulls().pulls
        with pytest.raises(FeatureDisabled):
            client.lookup(proto.PromptPages(tokens=prompt(2)))


def test_a_plan_hears_of_pulls_where_another_server_of_the_engine_serves_its_events(engines: Any) -> None:
    """As in SGLang and vLLM, where they are told by a publisher of the engine's own and lent by its cache."""
    hashes = hashes_of(prompt(6))
    values = [hash_key(sglang_event_hash(bytes.fromhex(each))) for each in hashes]
    engines("holder", 1), engines("taker", 1)
    with ExitStack() as closing:
        servers = []
        for name in ("holder", "taker"):
            publisher = open_publisher({"publisher": "null"}, RankRef(RankId(name), new_epoch()))
            closing.callback(publisher.shutdown, 1.0)
            servers.append(EventServer(publisher, ["127.0.0.1:0"]).open())
            closing.callback(servers[-1].close)
            if name == "holder":
                publisher.publish(KVEventBatch(0.0, [BlockStored(values, None, prompt(6), 4, medium="CPU")]))
        index = IndexServer(["127.0.0.1:0"], sources=[server.address for server in servers]).open()
        closing.callback(index.close)
        client = closing.enter_context(SyncClient(index.address))
        request = index_pb.PlanRequest(max_placements=2)
        request.prompts.add(prompt=index_pb.ScorePrompt(block_hashes=index_pb.BlockHashes(values=values)))

        def pull() -> tuple[str, int, int]:
            found = {each.engine: each.pull for each in client.plan(request).plans[0].placements}
            return (
                (found["taker"].engine, found["taker"].blocks, found["taker"].bytes) if "taker" in found else ("", 0, 0)
            )

        wait_until(lambda: pull() == ("holder", 6, 6 * PAGE_BYTES), 20.0)


@pytest.mark.parametrize(("holders", "takers"), [(2, 2), (2, 1), (1, 2), (2, 3)])
def test_where_all_ranks_have_the_same_bytes_the_one_that_writes_lends(
    engines: Any, registry: str, holders: int, takers: int
) -> None:
    holder, taker = engines("holder", holders, replicated=True), engines("taker", takers, replicated=True)
    hashes = hashes_of(prompt(6))
    holder[0].writes(hashes)
    for rank in taker:
        rank.takes(hashes)
    with SyncClient(registry) as client:
        rows = client.get_engine("holder").rows
    assert [bool(row.endpoints.cache) for row in rows] == [True, False][:holders]


def test_a_look_at_storage_counts_what_peers_have_for_the_rank_that_is_asked(engines: Any) -> None:
    """Another rank's pages are no names of this one's, and storage has none."""
    holder, taker = engines("holder", 2), engines("taker", 2)
    hashes = hashes_of(prompt(6))
    for rank in holder:
        rank.writes(hashes[:4])
    stored = StoredPages(taker[0].backend, taker[0].keys, PAGE_BYTES)
    wait_until(lambda: stored.leading_at_all_ranks(hashes, SECONDS) == 4, SECONDS)
