"""A router warms a real SGLang engine that is idle: pages come from storage before the request that needs them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.client.engines import cache_address as address_of
from kvgrpc.errors import CredentialsInvalid, FeatureDisabled, PermissionDenied
from kvgrpc.v1 import prefetch_service_pb2 as proto
from kvgrpc.v1.common_pb2 import TIER_DEVICE, TIER_HOST, TIER_STORAGE
from tests.engines import first_tokens
from tests.engines.engine import LOCAL, PAGE, Engine
from tests.engines.hierarchical import DEVICE_AND_HOST_TOKENS, HOST_RATIO, LONG_PROMPT, ask, cache_address, started
from tests.engines.model import COMPILING_SECONDS, Case, LatentReference, Reference
from tests.engines.ordering import order_by_name, pin_and_die, prefetch_and_die
from tests.support.cache_serving import ended
from tests.support.secrets import proof, secret
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(500)
PAGES = 8
PROMPT = PAGES * PAGE + 5
THRESHOLD = 2 * PAGE
LONG = 300  # tokens of an answer that goes on while its engine is looked at
# Whoever looks does so before it is over, on a machine that is busy too.
PIN_SECONDS = 5.0
ATTENTION = {"dp_size": 2, "enable_dp_attention": True, "enable_tp_lm_head_all_to_all": False}
ATTENTION_ON_CPU = {
    "SGLANG_ON_CPU_PLUGIN": "tests.engines.attention_data_parallel_on_cpu:register_with_host_tier",
}


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def engine(request: pytest.FixtureRequest, folder: Path, reference: Reference) -> Iterator[Engine]:
    engine = started(
        folder,
        reference,
        ranks=request.param,
        environment={"KVGRPC_CACHE_LISTEN": f"{LOCAL}:0"},
        storage="file",
        storage_config={"path": str(folder / f"kv-{request.param}")},
        prefetch_threshold=THRESHOLD,
    )
    try:
        yield engine.wait_ready()
    finally:
        engine.close()


@pytest.fixture
def router(engine: Engine) -> Iterator[SyncClient]:
    with SyncClient(cache_address(engine)) as client:
        yield client


@pytest.fixture
def stored(engine: Engine, router: SyncClient, reference: Reference) -> Case:
    """A prompt that the engine has computed, and has in storage alone."""
    case = reference.case(PROMPT)
    ask(engine, case)
    wait_until(lambda: router.lookup(pages(case)).storage_pages == PAGES and in_storage_alone(engine, router, case), 60)
    return case


def pages(case: Case) -> proto.PromptPages:
    return proto.PromptPages(tokens=case.prompt)


def in_storage_alone(engine: Engine, router: SyncClient, case: Case) -> bool:
    assert engine.is_empty()
    found = router.lookup(pages(case))
    return (found.device_pages, found.host_pages, found.storage_pages) == (0, 0, PAGES)


def tiers_of(router: SyncClient) -> dict[int, proto.CacheTierUse]:
    return {each.tier: each for each in router.get_cache_info().tiers}


def on_device(router: SyncClient) -> tuple[int, int, int]:
    """Pages that are used; of these, those that may be evicted, and those that may not, a running request's prefix."""
    device = tiers_of(router)[TIER_DEVICE]
    return device.used_pages, device.counts["evictable"], device.counts["protected"]


def pinned(router: SyncClient) -> int:
    return tiers_of(router)[TIER_HOST].counts["pinned"]


def came_of(router: SyncClient, operation: proto.CacheOperation) -> tuple[int, int]:
    """Pages that it brought: used, and lost before."""
    (found,) = [each for each in router.list_operations() if each.operation_id == operation.operation_id]
    return found.used_pages, found.wasted_pages


def drive_out(engine: Engine, reference: Reference) -> None:
    for _ in range(DEVICE_AND_HOST_TOKENS // LONG_PROMPT + 4):
        ask(engine, reference.case(LONG_PROMPT, new_tokens=1))


def test_a_request_finds_what_a_router_brought_while_the_engine_was_idle(
    engine: Engine, router: SyncClient, stored: Case, folder: Path, request: pytest.FixtureRequest
) -> None:
    operation = ended(router, router.start_prefetch(pages(stored)))
    assert operation.state == proto.OPERATION_STATE_DONE
    assert (operation.covered_pages, operation.hit_pages, operation.completed_pages) == (0, PAGES, PAGES)
    found = router.lookup(pages(stored))
    assert (found.device_pages, found.host_pages) == (0, PAGES)
    # Nothing can come from there any more: what the request finds is what the router brought.
    away = [path.rename(path.with_name(f"{path.name}-away")) for path in folder.glob("kv-?")]
    try:
        assert ask(engine, stored).cached == PAGES * PAGE
    finally:
        for path in away:
            path.rename(path.with_name(path.name.removesuffix("-away")))
    assert router.lookup(pages(stored)).device_pages == PAGES
    wait_until(lambda: came_of(router, operation) == (PAGES, 0))


def test_what_leaves_the_host_before_a_request_came_is_told(
    engine: Engine, router: SyncClient, stored: Case, reference: Reference
) -> None:
    operation = ended(router, router.start_prefetch(pages(stored)))
    half = reference.case(PAGES // 2 * PAGE + 3, prefix=stored.prompt[: PAGES // 2 * PAGE])
    assert ask(engine, half).cached == PAGES // 2 * PAGE
    wait_until(lambda: came_of(router, operation) == (PAGES // 2, 0))
    drive_out(engine, reference)
    wait_until(lambda: came_of(router, operation) == (PAGES // 2, PAGES // 2))


def test_what_is_there_already_is_not_brought_again(router: SyncClient, stored: Case) -> None:
    ended(router, router.start_prefetch(pages(stored)))
    again = ended(router, router.start_prefetch(pages(stored)))
    assert (again.state, again.stop) == (proto.OPERATION_STATE_DECLINED, proto.OPERATION_STOP_COVERED)
    assert again.completed_pages == PAGES


def test_a_longer_prompt_gets_the_part_that_storage_has(router: SyncClient, stored: Case, reference: Reference) -> None:
    longer = reference.case(2 * PROMPT, prefix=stored.prompt[: PAGES * PAGE])
    operation = ended(router, router.start_prefetch(pages(longer)))
    assert (operation.state, operation.completed_pages) == (proto.OPERATION_STATE_DONE, PAGES)
    assert router.lookup(pages(longer)).host_pages == PAGES


@pytest.mark.parametrize(
    ("tokens", "stop"),
    [(THRESHOLD - PAGE, proto.OPERATION_STOP_TOO_SHORT), (PROMPT, proto.OPERATION_STOP_BELOW_THRESHOLD)],
    ids=["a short prompt", "a prompt that storage does not have"],
)
def test_a_prefetch_that_is_not_worth_it_is_declined_with_the_reason(
    router: SyncClient, reference: Reference, tokens: int, stop: proto.OperationStop
) -> None:
    operation = ended(router, router.start_prefetch(pages(reference.case(tokens))))
    assert (operation.state, operation.stop) == (proto.OPERATION_STATE_DECLINED, stop)
    assert not router.list_operations(open_only=True)


def test_pages_are_found_by_tokens_alone(router: SyncClient) -> None:
    by_hash = proto.PromptPages(page_hashes=[bytes(32)] * PAGES)
    with pytest.raises(FeatureDisabled, match="give the prompt's tokens"):
        router.start_prefetch(by_hash)


def test_salts_and_extra_keys_are_caches_of_their_own(router: SyncClient, stored: Case) -> None:
    for other in (
        proto.PromptPages(tokens=stored.prompt, cache_salt="a"),
        proto.PromptPages(tokens=stored.prompt, extra_key="lora"),
    ):
        assert router.lookup(other).storage_pages == 0


def test_a_router_that_dies_leaves_nothing_locked(engine: Engine, router: SyncClient, stored: Case) -> None:
    operation_id = prefetch_and_die(cache_address(engine), stored.prompt)
    wait_until(lambda: not router.list_operations(open_only=True), 30)
    assert operation_id in [each.operation_id for each in router.list_operations()]
    assert engine.is_empty(), "SGLang empties its cache only where nothing is on its way"
    assert router.lookup(pages(stored), without_storage=True).host_pages == 0


def test_pins_of_a_router_that_dies_end_by_their_time(
    engine: Engine, router: SyncClient, stored: Case, reference: Reference
) -> None:
    ended(router, router.start_prefetch(pages(stored)))
    assert pin_and_die(cache_address(engine), stored.prompt, PIN_SECONDS) == PAGES
    assert pinned(router) == PAGES, "whoever pinned them is dead"
    wait_until(lambda: pinned(router) == 0, PIN_SECONDS + 10)
    drive_out(engine, reference)
    assert router.lookup(pages(stored), without_storage=True).host_pages == 0


def test_pinned_pages_stay_on_the_host_until_the_pin_ends(
    engine: Engine, router: SyncClient, stored: Case, reference: Reference
) -> None:
    ended(router, router.start_prefetch(pages(stored)))
    assert router.pin_pages(pages(stored), 300).pinned_pages == PAGES
    drive_out(engine, reference)
    assert router.lookup(pages(stored), without_storage=True).host_pages == PAGES
    assert pinned(router) == PAGES
    router.pin_pages(pages(stored), 0)
    drive_out(engine, reference)
    assert router.lookup(pages(stored), without_storage=True).host_pages == 0


def test_a_pin_does_not_outlive_an_emptied_cache(engine: Engine, router: SyncClient, stored: Case) -> None:
    ended(router, router.start_prefetch(pages(stored)))
    assert router.pin_pages(pages(stored), 1).pinned_pages == PAGES
    assert engine.is_empty()
    time.sleep(1.5)  # in which its end comes, for a node that is gone
    assert ask(engine, stored).tokens == stored.tokens


def test_a_backup_writes_again_what_storage_lost(
    engine: Engine, router: SyncClient, stored: Case, folder: Path
) -> None:
    ended(router, router.start_prefetch(pages(stored)))
    namespace = router.get_cache_info().cache_namespace
    router.purge_pages(proto.PurgePagesRequest(cache_namespace=namespace, tiers=[TIER_STORAGE]))
    assert router.lookup(pages(stored)).storage_pages == PAGES, "on the host"
    operation = ended(router, router.start_backup(pages(stored)))
    assert (operation.state, operation.completed_pages) == (proto.OPERATION_STATE_DONE, PAGES)
    assert in_storage_alone(engine, router, stored)


def test_a_backup_that_storage_refuses_has_failed(
    engine: Engine, router: SyncClient, stored: Case, folder: Path
) -> None:
    ended(router, router.start_prefetch(pages(stored)))
    away = [path.rename(path.with_name(f"{path.name}-away")) for path in folder.glob("kv-?")]
    there = [path.with_name(path.name.removesuffix("-away")) for path in away]
    for path in there:
        path.write_text("a file is no folder: nothing can be written below it")
    try:
        operation = ended(router, router.start_backup(pages(stored)))
    finally:
        for path, old in zip(there, away, strict=True):
            path.unlink()
            old.rename(path)
    assert (operation.state, operation.completed_pages) == (proto.OPERATION_STATE_FAILED, 0)
    assert f"storage took 0 of {PAGES * PAGE} tokens" in operation.failure.message
    again = ended(router, router.start_backup(pages(stored)))
    assert (again.state, again.completed_pages) == (proto.OPERATION_STATE_DONE, PAGES)


def test_the_engines_counts_are_told(engine: Engine, router: SyncClient, stored: Case) -> None:
    before = tiers_of(router)
    assert set(before) == {TIER_DEVICE, TIER_HOST, TIER_STORAGE}
    assert [before[tier].used_pages for tier in (TIER_DEVICE, TIER_HOST)] == [0, 0]
    ended(router, router.start_prefetch(pages(stored)))
    info, tiers = router.get_cache_info(), tiers_of(router)
    assert tiers[TIER_HOST].used_pages == PAGES and tiers[TIER_DEVICE].used_pages == 0
    assert tiers[TIER_DEVICE].pages == 4096 // PAGE and tiers[TIER_HOST].pages >= HOST_RATIO * 4096 // PAGE
    assert tiers[TIER_STORAGE].used_pages >= PAGES
    assert (info.storage_backend, info.storage_healthy, info.threshold_tokens) == ("file", True, THRESHOLD)
    ask(engine, stored)
    wait_until(lambda: on_device(router) == (PAGES, PAGES, 0))


def test_what_a_running_request_uses_is_told(engine: Engine, router: SyncClient, stored: Case) -> None:
    """It takes pages for its tokens beside those of the prompt, which nothing may evict meanwhile."""
    ask(engine, stored)
    running = engine.generate(stored.prompt, LONG)
    wait_until(lambda: running.first is not None)
    used, evictable, protected = on_device(router)
    assert running.ended is None, "it was over before it was looked at"
    assert PAGES < used <= (PROMPT + LONG) // PAGE + 1 and (evictable, protected) == (0, PAGES)
    running.result()
    wait_until(lambda: on_device(router) == ((PROMPT + LONG - 1) // PAGE,) * 2 + (0,))


def test_device_and_host_are_purged_by_sglang_itself(router: SyncClient) -> None:
    namespace = router.get_cache_info().cache_namespace
    with pytest.raises(FeatureDisabled, match="flush_cache"):
        router.purge_pages(proto.PurgePagesRequest(cache_namespace=namespace, tiers=[TIER_HOST]))


class TestSlowStorage:
    """Each call of storage takes up to four seconds: SGLang's own fault injector sees to that. Callers need tokens."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, folder: Path, reference: Reference) -> Iterator[Engine]:
        tokens = folder / "tokens"
        tokens.write_text(f"operator:{secret('operator')}\nconsumer router-a:{secret('router')}\n")
        engine = started(
            folder,
            reference,
            environment={
                "KVGRPC_CACHE_LISTEN": f"{LOCAL}:0",
                "KVGRPC_TOKENS_FILE": str(tokens),
                "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "4",
            },
            storage="file",
            storage_config={"path": str(folder / "kv-slow")},
            prefetch_threshold=THRESHOLD,
        )
        try:
            yield engine.wait_ready()
        finally:
            engine.close()

    @pytest.fixture
    def router(self, engine: Engine) -> Iterator[SyncClient]:
        """With an operator's token."""
        with SyncClient(cache_address(engine), security=proof("operator")) as client:
            yield client

    @pytest.fixture
    def stored(self, engine: Engine, reference: Reference) -> Case:
        case = reference.case(PROMPT)
        ask(engine, case)
        assert engine.is_empty(60), "what it wrote to the host is in storage before SGLang empties its cache"
        return case

    def test_one_whose_time_is_over_ends_with_what_is_there(
        self, engine: Engine, router: SyncClient, stored: Case
    ) -> None:
        for _ in range(5):
            operation = ended(router, router.start_prefetch(pages(stored), timeout=0.2))
            if operation.state == proto.OPERATION_STATE_EXPIRED:
                break
            assert operation.state == proto.OPERATION_STATE_DONE and engine.is_empty()
        assert operation.stop == proto.OPERATION_STOP_DEADLINE
        assert operation.completed_pages == router.lookup(pages(stored), without_storage=True).host_pages
        assert ask(engine, stored).tokens == stored.tokens

    @pytest.mark.parametrize(
        "state", [proto.OPERATION_STATE_QUERYING, proto.OPERATION_STATE_TRANSFERRING], ids=["querying", "transferring"]
    )
    def test_a_router_ends_what_it_began(
        self, engine: Engine, router: SyncClient, stored: Case, state: proto.OperationState
    ) -> None:
        for _ in range(10):
            operation = router.start_prefetch(pages(stored), request_id=f"{state}-{time.monotonic()}")
            if reaches(router, operation.operation_id, state):
                break
            assert engine.is_empty(30)
        operation = router.terminate_prefetch(operation.operation_id)
        assert (operation.state, operation.stop) == (
            proto.OPERATION_STATE_CANCELLED,
            proto.OPERATION_STOP_CANCELLED,
        )
        assert operation.quiescent and operation.completed_pages in (0, PAGES)
        assert ask(engine, stored).tokens == stored.tokens
        assert engine.is_empty(30)

    def test_a_routers_token_is_for_prefetches_of_its_own(
        self, engine: Engine, router: SyncClient, stored: Case
    ) -> None:
        with SyncClient(cache_address(engine)) as stranger, pytest.raises(CredentialsInvalid):
            stranger.start_prefetch(pages(stored))
        with SyncClient(cache_address(engine), security=proof("router")) as consumer:
            operators = router.start_prefetch(pages(stored))
            for refused in (
                lambda: consumer.terminate_prefetch(operators.operation_id),
                lambda: consumer.start_backup(pages(stored)),
                lambda: consumer.pin_pages(pages(stored), 60),
                lambda: consumer.drain(),
            ):
                with pytest.raises(PermissionDenied):
                    refused()
            assert ended(consumer, operators).state == proto.OPERATION_STATE_DONE
            assert engine.is_empty(30)
            operation = ended(consumer, consumer.start_prefetch(pages(stored)))
            assert (operation.state, operation.completed_pages) == (proto.OPERATION_STATE_DONE, PAGES)
        assert ask(engine, stored).cached == PAGES * PAGE

    def test_requests_are_served_while_an_order_waits_for_storage(
        self, engine: Engine, router: SyncClient, stored: Case, reference: Reference
    ) -> None:
        operation = router.start_prefetch(pages(stored))
        for _ in range(3):
            ask(engine, reference.case(THRESHOLD - 1))
        operation = ended(router, operation)
        assert operation.state == proto.OPERATION_STATE_DONE
        assert ask(engine, stored).cached == PAGES * PAGE


def test_the_first_token_of_a_warmed_prompt_comes_sooner_than_of_one_that_is_computed(folder: Path) -> None:
    reference = Reference(folder / "sooner", first_tokens.SIZE)
    longest = 2 * first_tokens.TOKENS
    sizes = {"chunked_prefill_size": longest, "max_prefill_tokens": longest}
    engine = started(
        folder,
        reference,
        environment={"KVGRPC_CACHE_LISTEN": f"{LOCAL}:0"},
        sizes={"context_length": longest, "max_total_tokens": 2 * longest, **sizes},
        storage="file",
        storage_config={"path": str(folder / "kv-sooner")},
    )
    try:
        engine.wait_ready()
        with SyncClient(cache_address(engine)) as router:
            first_tokens.come_sooner(engine, router, reference, folder / "kv-sooner", PAGE)
    finally:
        engine.close()


class TestReplicas:
    """Two dp ranks: each has a cache of its own, and takes orders at an address of its own. P0's have a model each,
    those of P0-attention compute all but attention together."""

    @pytest.fixture(scope="class", params=["P0", "P0-attention"])
    @classmethod
    def name(cls, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, name: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
        return (Reference if name == "P0" else LatentReference)(tmp_path_factory.mktemp(name))

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, folder: Path, name: str, reference: Reference, registry: str) -> Iterator[Engine]:
        environment = {"KVGRPC_CACHE_LISTEN": f"{LOCAL}:0", "KVGRPC_ENGINE": name, "KVGRPC_REGISTRY": registry}
        engine = started(
            folder,
            reference,
            sizes={"dp_size": 2} if name == "P0" else {"tp_size": 2, **ATTENTION},
            environment=environment if name == "P0" else {**environment, **ATTENTION_ON_CPU},
            storage="file",
            storage_config={"path": str(folder / name)},
            prefetch_threshold=THRESHOLD,
        )
        try:
            yield engine.wait_ready()
        finally:
            engine.close()

    @pytest.mark.parametrize("dp", [0, 1])
    def test_an_order_by_the_engines_name_warms_the_replica_that_it_names(
        self, engine: Engine, registry: str, name: str, reference: Reference, dp: int
    ) -> None:
        case = reference.case(PROMPT)

        def cached() -> int:
            request = engine.generate(case.prompt, len(case.tokens), routed_dp_rank=dp)
            assert request.result(COMPILING_SECONDS) == case.tokens
            return request.cached

        assert cached() == 0
        with SyncClient(registry) as client:
            wait_until(lambda: len(client.get_engine(name).rows) == 2)
            addresses = [address_of(client.get_engine(name), each) for each in (dp, 1 - dp)]
        with SyncClient(addresses[0]) as named, SyncClient(addresses[1]) as other:
            wait_until(lambda: named.lookup(pages(case)).storage_pages == PAGES, 60)
            wait_until(lambda: in_storage_alone(engine, named, case), 60)
            operation = order_by_name(registry, name, case.prompt, "--dp", str(dp))
            assert (operation["state"], operation["completedPages"]) == ("OPERATION_STATE_DONE", PAGES)
            assert other.lookup(pages(case), without_storage=True).host_pages == 0
            assert cached() == PAGES * PAGE
            wait_until(lambda: [each.used_pages for each in named.list_operations()] == [PAGES])
        assert engine.is_empty()


def reaches(router: SyncClient, operation_id: str, state: proto.OperationState) -> bool:
    """Whether it was seen in that state before it ended."""
    for message in router.watch_operations([operation_id]):
        for operation in message.operations:
            if operation.state == state:
                return True
    return False
