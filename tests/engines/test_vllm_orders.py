"""Orders for vLLM's offloading: its own manager, tiers and host memory, ours among them, stepped as by an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvgrpc.client import SyncClient
from kvgrpc.engines.vllm import orders
from kvgrpc.engines.vllm.offload import promotion
from kvgrpc.engines.vllm.offload.engine_core import EngineCore
from kvgrpc.engines.vllm.offload.keys import ChunkNames
from kvgrpc.engines.vllm.offload.outcomes import Outcomes
from kvgrpc.engines.vllm.offload.promotion import Promotion
from kvgrpc.engines.vllm.orders import config_of
from kvgrpc.engines.vllm.tier import KvGrpcTier
from kvgrpc.errors import FeatureDisabled, InvalidRequest, StorageFailed
from kvgrpc.server import RankConfig
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import prefetch_service_pb2 as pb
from tests.engines.vllm_tiers import (
    BLOCK,
    CHUNK_BYTES,
    CHUNKS,
    Offloading,
    SlowStore,
    ended,
    keys_of,
    offloading,
    prompt,
    row,
    start,
)


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests of whose end vLLM told its tiers, which is when it forgets them itself."""
    ended_requests: list[str] = []
    heard = KvGrpcTier.on_request_finished

    def hear(tier: KvGrpcTier, context: ReqContext) -> None:
        ended_requests.append(context.req_id)
        heard(tier, context)

    monkeypatch.setattr(KvGrpcTier, "on_request_finished", hear)
    return ended_requests


def test_an_order_brings_what_storage_has_and_holds_nothing_afterwards(tmp_path: Path) -> None:
    tokens = prompt(6)
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys_of(tokens))
        engine.empty_host()
        found = client.lookup(pb.PromptPages(tokens=tokens))
        assert (found.host_pages, found.storage_pages, found.page_tokens) == (0, 6, BLOCK)
        operation = ended(client, start(client, tokens))
        assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DONE, 6)
        assert operation.bytes == 6 * CHUNK_BYTES
        assert client.lookup(pb.PromptPages(tokens=tokens)).host_pages == 6
        engine.wait(engine.nothing_is_held)
        assert engine.request(keys_of(tokens)) == 6


def test_an_order_brings_what_is_behind_the_hosts_own_part_and_does_not_evict_it(tmp_path: Path) -> None:
    """The head of the prompt is the oldest that the host has, and the host is full."""
    tokens = prompt(8)
    keys = keys_of(tokens)
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys[:4])
        engine.compute(keys[4:])
        engine.empty_host()
        engine.compute(keys[:4])
        others = keys_of(prompt(12, 1000))
        engine.compute(others)
        operation = ended(client, start(client, tokens))
        assert (operation.state, operation.covered_pages) == (pb.OPERATION_STATE_DONE, 4)
        assert operation.completed_pages == 8
        assert engine.request(keys) == 8


def test_what_nobody_has_is_declined_and_what_the_host_has_is_covered(tmp_path: Path) -> None:
    with offloading(tmp_path) as (engine, client):
        operation = ended(client, start(client, prompt(3)))
        assert (operation.state, operation.stop) == (pb.OPERATION_STATE_DECLINED, pb.OPERATION_STOP_BELOW_THRESHOLD)
        engine.compute(keys_of(prompt(3)))
        operation = ended(client, start(client, prompt(3)))
        assert (operation.state, operation.stop) == (pb.OPERATION_STATE_DECLINED, pb.OPERATION_STOP_COVERED)


def test_an_order_takes_no_more_than_its_share_of_the_host(tmp_path: Path) -> None:
    keys = keys_of(prompt(12))
    with offloading(tmp_path, limits={"occupancy": 0.25}) as (engine, client):
        engine.compute(keys)
        engine.empty_host()
        operation = ended(client, start(client, prompt(12)))
        assert (operation.state, operation.stop) == (pb.OPERATION_STATE_DONE, pb.OPERATION_STOP_CAPACITY)
        assert operation.completed_pages == CHUNKS // 4
        engine.wait(engine.nothing_is_held)


def test_the_store_lost_a_chunk_in_the_middle_and_what_is_before_it_came(tmp_path: Path) -> None:
    keys = keys_of(prompt(6))
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys[:3])
        engine.compute(keys[4:])
        engine.empty_host()
        operation = ended(client, start(client, prompt(6)))
        assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DONE, 3)


def test_what_became_of_the_chunks_is_told(tmp_path: Path) -> None:
    keys = keys_of(prompt(4))
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys)
        engine.empty_host()
        operation = ended(client, start(client, prompt(4)))
        engine.request(keys[:3])
        engine.compute(keys_of(prompt(CHUNKS, 1000)))  # which takes the whole host

        def told() -> tuple[int, int]:
            (only,) = [each for each in client.list_operations() if each.operation_id == operation.operation_id]
            return only.used_pages, only.wasted_pages

        engine.wait(lambda: told() == (3, 1))


def cut_by_its_router(engine: Offloading, client: SyncClient, operation: pb.CacheOperation) -> None:
    """Who does not wait for the end is told that it is not there."""
    with SyncClient(engine.address, timeout=1.0) as hasty:
        assert not hasty.terminate_prefetch(operation.operation_id).quiescent


def cut_by_its_deadline(engine: Offloading, client: SyncClient, operation: pb.CacheOperation) -> None:
    engine.wait(lambda: row(client, operation).took.ToTimedelta().total_seconds() > TIMEOUT)


TIMEOUT = 2.0  # of an order: so long until chunks come
CUTS = {
    "by its router": (cut_by_its_router, None, (pb.OPERATION_STATE_CANCELLED, pb.OPERATION_STOP_CANCELLED)),
    "by its deadline": (cut_by_its_deadline, TIMEOUT, (pb.OPERATION_STATE_EXPIRED, pb.OPERATION_STOP_DEADLINE)),
}
Cut = Callable[[Offloading, SyncClient, pb.CacheOperation], None]


@pytest.mark.parametrize(("cut", "timeout", "end"), CUTS.values(), ids=CUTS)
def test_an_order_that_is_cut_while_chunks_come_ends_with_these_and_holds_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    over: list[str],
    cut: Cut,
    timeout: float | None,
    end: tuple[int, int],
) -> None:
    """The host has two chunks, two are on their way, of the last two the store has not said whether it has them."""
    monkeypatch.setattr(promotion, "LOOKUPS_OF_A_STEP", 2)
    keys, prompt_pages = keys_of(prompt(6)), pb.PromptPages(tokens=prompt(6))
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys)
        engine.empty_host()
        engine.compute(keys[:2])
        store = SlowStore(engine, late=keys[4:])
        operation = start(client, prompt(6), timeout)
        engine.wait(lambda: store.reading.is_set() and row(client, operation).hit_pages == 2)
        cut(engine, client, operation)
        assert row(client, operation).state == pb.OPERATION_STATE_TRANSFERRING, "vLLM still fills two chunks"
        assert not engine.nothing_is_held()

        store.hands_over.set()
        operation = ended(client, operation)
        assert (operation.state, operation.stop) == end
        assert (operation.covered_pages, operation.completed_pages, operation.bytes) == (2, 4, 2 * CHUNK_BYTES)
        engine.wait(lambda: engine.nothing_is_held() and not engine.manager.has_pending_work())
        assert over.count(f"kvgrpc-{operation.operation_id}") == 1
        assert client.lookup(prompt_pages, without_storage=True).host_pages == 4
        assert engine.request(keys) == 4
        engine.wait(lambda: row(client, operation).used_pages == 2)

        store.answers.set()
        operation = ended(client, start(client, prompt(6)))
        assert (operation.state, operation.covered_pages) == (pb.OPERATION_STATE_DONE, 4)
        assert operation.completed_pages == 6 and engine.request(keys) == 6


@pytest.mark.parametrize(("timeout", "end"), [(None, CUTS["by its router"][2]), (1.0, CUTS["by its deadline"][2])])
def test_an_order_that_is_cut_before_the_store_has_answered_does_not_wait_for_it(
    tmp_path: Path, over: list[str], timeout: float | None, end: tuple[int, int]
) -> None:
    keys = keys_of(prompt(6))
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys)
        engine.empty_host()
        engine.compute(keys[:2])
        store = SlowStore(engine, late=keys)
        operation = start(client, prompt(6), timeout)
        if timeout is None:
            engine.wait(lambda: row(client, operation).covered_pages == 2)
            operation = client.terminate_prefetch(operation.operation_id)
        operation = ended(client, operation)
        assert (operation.state, operation.stop) == end
        assert (operation.covered_pages, operation.completed_pages, operation.bytes) == (2, 2, 0)
        engine.wait(lambda: engine.nothing_is_held() and not engine.manager.has_pending_work())
        assert over.count(f"kvgrpc-{operation.operation_id}") == 1
        store.let_go()
        assert ended(client, start(client, prompt(6))).completed_pages == 6


@pytest.mark.parametrize(("timeout", "end"), [(None, CUTS["by its router"][2]), (0.3, CUTS["by its deadline"][2])])
def test_an_order_that_an_idle_engine_has_not_taken_ends_without_it(
    tmp_path: Path, timeout: float | None, end: tuple[int, int]
) -> None:
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys_of(prompt(6)))
        engine.empty_host()
        engine.stop_stepping()
        for _ in range(2):  # each answered between steps, the second one after all that the last step let in
            client.lookup(pb.PromptPages(tokens=prompt(6)), without_storage=True)
        operation = start(client, prompt(6), timeout)
        if timeout is None:
            client.terminate_prefetch(operation.operation_id)
        operation = ended(client, operation)
        assert (operation.state, operation.stop, operation.completed_pages) == (*end, 0)
        after = start(client, prompt(6))

        def moved_on() -> bool:
            engine.step()
            return row(client, after).quiescent

        engine.wait(moved_on)
        assert row(client, after).completed_pages == 6


def test_a_router_that_is_gone_leaves_nothing_behind(tmp_path: Path) -> None:
    keys = keys_of(prompt(6))
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys)
        engine.empty_host()
        with SyncClient(engine.address) as router:
            for number in range(5):
                router.start_prefetch(pb.PromptPages(tokens=prompt(6)), request_id=f"r{number}")
        engine.wait(lambda: not client.list_operations(open_only=True))
        engine.wait(engine.nothing_is_held)
        assert not engine.manager.has_pending_work()


@pytest.mark.parametrize("call", ["begin", "step", "__init__"])
def test_an_order_that_goes_wrong_is_forgotten_and_the_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: list[str], call: str
) -> None:
    """Wherever it does. What vLLM's tiers said of its chunks holds until they hear of its end."""
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys_of(prompt(6)))
        engine.empty_host()

        real = getattr(Promotion, call)

        def fail(*arguments: object) -> bool:
            real(*arguments)
            raise RuntimeError("dictionary changed size during iteration")

        with monkeypatch.context() as patched:
            patched.setattr(Promotion, call, fail)
            operation = ended(client, start(client, prompt(6)))
        assert operation.state == pb.OPERATION_STATE_FAILED and "changed size" in operation.failure.message
        assert call == "__init__" or over.count(f"kvgrpc-{operation.operation_id}") == 1
        assert ended(client, start(client, prompt(6))).completed_pages == 6


def test_orders_go_on_where_nobody_can_say_what_became_of_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys_of(prompt(6)))
        engine.empty_host()
        looks = []

        def fail(*_: object) -> None:
            looks.append(1)
            raise RuntimeError("it cannot be looked at")

        monkeypatch.setattr(Outcomes, "look", fail)
        assert ended(client, start(client, prompt(3))).completed_pages == 3
        engine.wait(lambda: looks)
        assert ended(client, start(client, prompt(6))).completed_pages == 6


def test_an_emptied_cache_ends_an_order_and_the_next_one_is_whole(tmp_path: Path) -> None:
    """Whose chunks were there, too. vLLM's reset asserts that no tier holds anything."""
    keys, lost = keys_of(prompt(8)), (pb.OPERATION_STATE_FAILED, pb.OPERATION_STOP_PAGE_LOST, 0)
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys)
        engine.empty_host()
        engine.compute(keys[:2])
        store = SlowStore(engine, late=keys)
        operations = [start(client, prompt(8)) for _ in range(4)]
        engine.wait(lambda: [row(client, each).covered_pages for each in operations] == [2] * 4)
        assert engine.request(keys) == 2 and not engine.nothing_is_held()
        engine.empty_host()
        assert engine.request(keys) == 0 and client.get_cache_info().tiers[0].used_pages == 0
        store.let_go()
        for operation in operations:
            end = ended(client, operation)
            assert (end.state, end.stop, end.completed_pages) == lost and "emptied" in end.failure.message
        engine.wait(engine.nothing_is_held)
        assert ended(client, start(client, prompt(8))).completed_pages == 8 and engine.request(keys) == 8


def test_an_order_whose_chunks_came_before_the_cache_was_emptied_says_that_they_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "LOOKUPS_OF_A_STEP", 2)
    keys = keys_of(prompt(6))
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys)
        engine.empty_host()
        engine.compute(keys[:2])
        store = SlowStore(engine, late=keys[4:])
        store.hands_over.set()
        operation = start(client, prompt(6))
        engine.wait(lambda: row(client, operation).completed_pages == 4)
        engine.empty_host()
        store.let_go()
        operation = ended(client, operation)
        assert (operation.state, operation.stop) == (pb.OPERATION_STATE_FAILED, pb.OPERATION_STOP_PAGE_LOST)
        assert (operation.completed_pages, operation.bytes) == (0, 0) and engine.request(keys) == 0


def test_an_order_of_a_host_that_is_being_emptied_waits_until_its_workers_are_done(tmp_path: Path) -> None:
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys_of(prompt(6)))
        engine.stop_stepping()
        engine.begin_emptying()
        operation = start(client, prompt(6))
        for _ in range(3):
            engine.step()
        assert not row(client, operation).quiescent and engine.manager.has_pending_work()
        engine.end_emptying()
        step_on(engine, lambda: row(client, operation).quiescent)
        operation = row(client, operation)
        assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DONE, 6)


def test_an_order_of_a_host_whose_emptying_does_not_end_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys_of(prompt(6)))
        engine.begin_emptying()
        operation = ended(client, start(client, prompt(6), timeout=0.3))
        assert (operation.state, operation.stop, operation.completed_pages) == (*CUTS["by its deadline"][2], 0)
        engine.end_emptying()
        assert ended(client, start(client, prompt(6))).completed_pages == 6


def test_a_store_that_hangs_fails_the_emptying_of_the_cache_and_the_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks are being filled: vLLM gives them to nobody else."""
    keys = keys_of(prompt(6))
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys)
        engine.empty_host()
        engine.compute(keys[:4])
        store = SlowStore(engine, late=())
        monkeypatch.setattr(engine.manager.secondary_tiers[0], "_timeout", 0.3)
        operation = start(client, prompt(6))
        engine.wait(store.reading.is_set)
        with pytest.raises(StorageFailed, match="1 jobs still use 2 chunks"):
            engine.empty_host()
        assert engine.request(keys) == 4 and row(client, operation).state == pb.OPERATION_STATE_TRANSFERRING
        store.let_go()
        assert ended(client, operation).completed_pages == 6 and engine.request(keys) == 6
        engine.wait(engine.nothing_is_held)
        engine.empty_host()
        assert engine.request(keys) == 0


class Work:
    """Counts what each step of an engine does for orders: names of chunks that it makes, and chunks that it looks for
    on the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = [Counter[str]()]
        self._note(monkeypatch, ChunkNames, "keys")
        self._note(monkeypatch, EngineCore, "leading_on_device")

    def _note(self, monkeypatch: pytest.MonkeyPatch, kind: type, call: str) -> None:
        real = getattr(kind, call)

        def note(part: Any, chunks: Sequence[Any]) -> Any:
            self.steps[-1][call] += len(chunks)
            return real(part, chunks)

        monkeypatch.setattr(kind, call, note)

    def most(self, what: str) -> int:
        return max(each[what] for each in self.steps)

    def all(self, what: str) -> int:
        return sum(each[what] for each in self.steps)


def step_on(engine: Offloading, over: Callable[[], bool], work: Work | None = None) -> None:
    """Steps of an idle engine, one after the other."""

    def stepped() -> bool:
        engine.step()
        if work is not None:
            work.steps.append(Counter())
        return over()

    engine.wait(stepped)


def test_a_step_does_a_part_of_the_work_for_long_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, for the engine's requests wait for its step."""
    monkeypatch.setattr(promotion, "NAMES_OF_A_STEP", 16)
    monkeypatch.setattr(promotion, "LOOKUPS_OF_A_STEP", 8)
    with offloading(tmp_path, limits={"occupancy": 1.0}, polls=False) as (engine, client):
        engine.compute(keys_of(prompt(2)))
        engine.stop_stepping()
        work = Work(monkeypatch)
        begun = [start(client, prompt(40)) for _ in range(8)]
        step_on(engine, lambda: all(row(client, each).quiescent for each in begun), work)
        assert {row(client, each).covered_pages for each in begun} == {2}
        assert work.all("keys") == 8 * 40 and work.most("keys") == 16
        assert work.all("leading_on_device") > 0 and work.most("leading_on_device") <= 8


def test_long_orders_do_not_all_end_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks at each chunk of a request that ends, and of a pin."""
    monkeypatch.setattr(orders, "_CHUNKS_AT_ONCE", 4)
    monkeypatch.setattr(promotion, "LOOKUPS_OF_A_STEP", 4)
    with offloading(tmp_path, limits={"occupancy": 1.0}, polls=False) as (engine, client):
        engine.compute(keys_of(prompt(6)))
        engine.stop_stepping()
        pins, released, calls = dict[int, int](), engine.tier.get_finished_jobs, [0]
        make = engine.manager.create_store_job

        def pin(keys: Sequence[OffloadKey], *more: Any) -> TransferJob:
            job: TransferJob = make(keys, *more)
            pins[job.job_id] = len(keys)
            return job

        def release() -> list[JobResult]:
            found = list(released())
            calls.append(sum(pins[each.job_id] for each in found))
            return found

        monkeypatch.setattr(engine.manager, "create_store_job", pin)
        monkeypatch.setattr(engine.tier, "get_finished_jobs", release)
        begun, ended_in = [start(client, prompt(7)) for _ in range(2)], list[int]()

        def over() -> bool:
            ended_in.append(sum(row(client, each).quiescent for each in begun))
            return ended_in[-1] == 2 and engine.nothing_is_held()

        step_on(engine, over)
        assert {row(client, each).covered_pages for each in begun} == {6} and 1 in ended_in
        assert sum(calls) == 12 and max(calls) <= 4


def test_an_emptied_host_holds_nothing_however_much_was_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asserts it."""
    monkeypatch.setattr(orders, "_CHUNKS_AT_ONCE", 2)
    monkeypatch.setattr(promotion, "LOOKUPS_OF_A_STEP", 1)
    keys = keys_of(prompt(8))
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys)
        engine.empty_host()
        engine.compute(keys[:6])
        store = SlowStore(engine, late=keys)
        operation = start(client, prompt(8))
        engine.wait(lambda: row(client, operation).covered_pages == 6)
        engine.empty_host()
        assert engine.request(keys) == 0
        store.let_go()
        assert ended(client, operation).quiescent


@pytest.mark.parametrize(("cut", "timeout", "end"), CUTS.values(), ids=CUTS)
def test_a_long_order_that_is_cut_before_all_its_chunks_have_names_ends_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    over: list[str],
    cut: Cut,
    timeout: float | None,
    end: tuple[int, int],
) -> None:
    monkeypatch.setattr(promotion, "NAMES_OF_A_STEP", 2)
    with offloading(tmp_path, polls=False) as (engine, client):
        engine.compute(keys_of(prompt(8)))
        engine.stop_stepping()
        work = Work(monkeypatch)
        operation = start(client, prompt(8), timeout)
        step_on(engine, lambda: work.all("keys") == 4)
        cut(engine, client, operation)
        assert not row(client, operation).quiescent
        engine.step()
        operation = row(client, operation)
        assert (operation.state, operation.stop, operation.completed_pages) == (*end, 0)
        assert work.all("keys") == 4
        step_on(engine, lambda: engine.nothing_is_held() and not engine.manager.has_pending_work())
        assert over.count(f"kvgrpc-{operation.operation_id}") == 1


def test_what_vllm_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    with offloading(tmp_path) as (_, client):
        for call in (
            lambda: client.pin_pages(pb.PromptPages(tokens=prompt(1)), 1.0),
            lambda: client.start_backup(pb.PromptPages(tokens=prompt(1))),
        ):
            with pytest.raises(FeatureDisabled):
                call()
        info = client.get_cache_info()
        host = pb.PurgePagesRequest(cache_namespace=info.cache_namespace, tiers=[common_pb2.TIER_HOST])
        with pytest.raises(FeatureDisabled, match="reset_prefix_cache"):
            client.purge_pages(host)
        with pytest.raises(InvalidRequest, match="extra_key"):
            client.lookup(pb.PromptPages(tokens=prompt(1), extra_key="adapter"))


def test_the_tiers_and_their_use_are_told_and_storage_can_be_purged(tmp_path: Path) -> None:
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys_of(prompt(5)))
        info = client.get_cache_info()
        tiers = {each.tier: each for each in info.tiers}
        host = tiers[common_pb2.TIER_HOST]
        assert (host.pages, host.used_pages, host.page_bytes) == (CHUNKS, 5, CHUNK_BYTES)
        assert (info.storage_backend, info.storage_healthy, info.cache_namespace.page_tokens) == ("file", True, BLOCK)
        request = pb.PurgePagesRequest(cache_namespace=info.cache_namespace, tiers=[common_pb2.TIER_STORAGE])
        assert client.purge_pages(request).storage_pages == 5
        assert client.lookup(pb.PromptPages(tokens=prompt(5))).storage_pages == 5  # the host has them still
        engine.empty_host()
        assert client.lookup(pb.PromptPages(tokens=prompt(5))).storage_pages == 0


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    for wrong in ({"limits": {"no_such": 1}}, {"no_such": 1}):
        with pytest.raises(InvalidRequest, match="no_such"), offloading(tmp_path, **wrong):
            pass


@pytest.mark.parametrize("size", [1, 2])
def test_each_replica_listens_at_a_port_of_its_own(size: int) -> None:
    """All replicas of an engine have one configuration, and may be on one host."""
    model = SimpleNamespace(name="/m", dtype="float32")

    def config(dp: int, **more: str) -> RankConfig:
        parallel = SimpleNamespace(data_parallel_index=dp, data_parallel_size=size)
        return config_of(SimpleNamespace(config=SimpleNamespace(parallel=parallel, model=model)), "P0", "", more)

    def listens(dp: int, **more: str) -> str:
        return config(dp, **more).listen

    def advertises(dp: int, advertise: str) -> str:
        return config(dp, listen="0.0.0.0:7777", advertise=advertise).advertise

    assert [listens(dp, listen="10.0.0.1:7777") for dp in (0, 1)] == ["10.0.0.1:7777", "10.0.0.1:7778"]
    assert listens(1, listen="10.0.0.1:0") == "10.0.0.1:0" and listens(1) == "127.0.0.1:0"
    with pytest.raises(InvalidRequest, match="listen: must be"):
        listens(1, listen="10.0.0.1:65535")
    assert [advertises(dp, "10.0.0.1:7777") for dp in (0, 1)] == ["10.0.0.1:7777", "10.0.0.1:7778"]
    assert [advertises(dp, "pod:30000") for dp in (0, 1)] == ["pod:30000", "pod:30001"]
    assert advertises(1, "10.0.0.1") == "10.0.0.1"
    assert advertises(1, "10.0.0.1:7778") == "10.0.0.1:7778", "a replica alone on its host, which says where it is"
    with pytest.raises(InvalidRequest, match="advertise: must be"):
        advertises(1, "10.0.0.1:65535")
