"""A router's orders to a real vLLM that does nothing: what storage has is in its host memory when the request comes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.errors import CredentialsInvalid, PermissionDenied
from kvgrpc.v1 import prefetch_service_pb2 as pb
from kvgrpc.v1.common_pb2 import TIER_DEVICE, TIER_HOST, TIER_STORAGE
from tests.engines import first_tokens
from tests.engines.model import WINDOW, Case, Reference, WindowReference
from tests.engines.ordering import order_by_name, prefetch_and_die
from tests.engines.vllm_engine import BLOCK, VllmEngine, vllm_arguments
from tests.engines.vllm_pulling import address, compute, file_tier, offloading, orders, tier
from tests.support.cache_serving import ended
from tests.support.secrets import proof, secret
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
CHUNKS = 32
LONG = 200  # tokens of an answer that goes on while its engine is looked at


@contextmanager
def engine(folder: Path, model: Path, registry: str, name: str, ranks: int = 1, **more: object) -> Iterator[VllmEngine]:
    """``more``: of the tier that takes orders. Storage is slow while ``slow(folder)`` exists."""
    stored = {
        **file_tier(folder / f"tier-{name}"),
        "type": "SlowTier",
        "module_path": "tests.engines.vllm_slow_tier",
        "slow_while": str(slow(folder)),
    }
    caching = offloading(CHUNKS, stored, orders(name, registry, **more))
    opened = VllmEngine("offloading", folder, {**vllm_arguments(model, ranks), "kv_transfer_config": caching})
    try:
        opened.wait_ready()
        yield opened
    finally:
        opened.close()


def slow(folder: Path) -> Path:
    return folder / "storage-is-slow"


def used(client: SyncClient) -> tuple[int, int, int]:
    """Blocks of the device, and chunks of the host and of storage."""
    tiers = {each.tier: each.used_pages for each in client.get_cache_info().tiers}
    return tiers[TIER_DEVICE], tiers[TIER_HOST], tiers[TIER_STORAGE]


@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "two ranks"])
def test_a_router_warms_an_idle_engine_and_the_request_that_follows_finds_the_pages(
    folder: Path, reference: Reference, registry: str, ranks: int
) -> None:
    name = f"P{ranks}"
    with engine(folder, reference.path, registry, name, ranks) as opened:
        where = address(registry, name)
        with SyncClient(where) as client:
            what_is_used_is_told(opened, client, reference)
            case = reference.case(6 * BLOCK + 3)
            evicted_from_device_and_host(opened, client, reference, case)
            operation = order_by_name(registry, name, case.prompt)
            assert (operation["state"], operation["completedPages"]) == ("OPERATION_STATE_DONE", 6)
            is_used_by_the_request_that_follows(opened, client, case)
            a_router_that_dies_leaves_nothing_behind(opened, client, where, reference, slow(folder))
            a_request_beside_an_order_is_right(opened, client, reference)


def test_a_router_warms_a_model_with_sliding_windows(folder: Path, registry: str) -> None:
    """Of these layers it brings what the last window sees, which is all that the request that follows takes."""
    windowed = WindowReference(folder / "windowed").for_vllm()
    pages, window = 6, WINDOW // BLOCK
    with engine(folder, windowed.path, registry, "P-windowed") as opened:
        where = address(registry, "P-windowed")
        with SyncClient(where) as client:
            case = windowed.case(pages * BLOCK + 3)
            prompt = pb.PromptPages(tokens=case.prompt)
            assert compute(opened, case) == 0
            wait_until(lambda: client.lookup(prompt).storage_pages == pages)
            assert opened.is_empty(host=True)
            wait_until(lambda: used(client)[:2] == (0, 0))
            found = client.lookup(prompt)
            assert (found.device_pages, found.host_pages, found.storage_pages) == (0, 0, pages)
            operation = ended(client, client.start_prefetch(prompt))
            assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DONE, pages)
            assert used(client)[:2] == (0, pages + window)
            assert client.lookup(prompt, without_storage=True).host_pages == pages
            assert compute(opened, case) == pages * BLOCK
            wait_until(lambda: [each.used_pages for each in client.list_operations()] == [pages])
            assert client.lookup(prompt).device_pages == pages
            assert opened.is_empty()
            # The beginning is there, but of windows vLLM has kept the end of that prompt alone.
            other = windowed.case(pages * BLOCK + 3, prefix=case.prompt[: 4 * BLOCK])
            prompt = pb.PromptPages(tokens=other.prompt)
            assert client.lookup(prompt).storage_pages == 0
            operation = ended(client, client.start_prefetch(prompt))
            assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DECLINED, 0)
            assert compute(opened, other) == 0
            assert opened.is_empty()


def what_is_used_is_told(opened: VllmEngine, client: SyncClient, reference: Reference) -> None:
    """Of the device while a request runs: vLLM calls blocks free that only its prefix cache has."""
    tiers = {each.tier: each.pages for each in client.get_cache_info().tiers}
    assert (tiers[TIER_DEVICE], tiers[TIER_HOST]) == (8 * 512 // BLOCK, CHUNKS)
    assert used(client) == (0, 0, 0)
    case = reference.case(6 * BLOCK + 3)
    running = opened.generate(case.prompt, LONG)
    wait_until(lambda: running.first is not None)
    device = used(client)[0]
    assert running.ended is None, "it was over before it was looked at"
    assert 7 <= device <= math.ceil((6 * BLOCK + 3 + LONG) / BLOCK)
    assert running.result()[: len(case.tokens)] == case.tokens
    # Of its prompt, which is all that vLLM offloads.
    wait_until(lambda: used(client) == (0, 6, 6))
    assert opened.is_empty(host=True)
    assert used(client) == (0, 0, 6)


def evicted_from_device_and_host(opened: VllmEngine, client: SyncClient, reference: Reference, case: Case) -> None:
    """Computed, stored, and then only in storage: other prompts took the host, and the device was emptied."""
    assert compute(opened, case) == 0
    prompt = pb.PromptPages(tokens=case.prompt)
    wait_until(lambda: client.lookup(prompt).storage_pages == 6)
    for _ in range(CHUNKS // 6 + 1):
        compute(opened, reference.case(6 * BLOCK))
    assert opened.is_empty()
    found = client.lookup(prompt)
    assert (found.device_pages, found.host_pages, found.storage_pages) == (0, 0, 6)


def is_used_by_the_request_that_follows(opened: VllmEngine, client: SyncClient, case: Case) -> None:
    assert client.lookup(pb.PromptPages(tokens=case.prompt)).host_pages == 6
    assert compute(opened, case) == 6 * BLOCK
    wait_until(lambda: [each.used_pages for each in client.list_operations()] == [6])
    assert client.lookup(pb.PromptPages(tokens=case.prompt)).device_pages == 6
    assert opened.is_empty()


def a_router_that_dies_leaves_nothing_behind(
    opened: VllmEngine, client: SyncClient, where: str, reference: Reference, slow: Path
) -> None:
    case = reference.case(6 * BLOCK + 3)
    evicted_from_device_and_host(opened, client, reference, case)
    slow.touch()
    began = prefetch_and_die(where, case.prompt)
    assert [each.operation_id for each in client.list_operations(open_only=True)] == [began], "it died too late"
    slow.unlink()
    wait_until(lambda: not client.list_operations(open_only=True))
    assert client.lookup(pb.PromptPages(tokens=case.prompt), without_storage=True).host_pages == 6
    # Nothing is pinned: other prompts take all of the host.
    for _ in range(CHUNKS // 6 + 1):
        compute(opened, reference.case(6 * BLOCK))
    assert opened.is_empty()
    assert client.lookup(pb.PromptPages(tokens=case.prompt), without_storage=True).host_pages == 0

    def told() -> int:
        return next(each.wasted_pages for each in client.list_operations() if each.operation_id == began)

    compute(opened, reference.case(2 * BLOCK))  # what was evicted is looked for in steps
    wait_until(lambda: told() == 6 or compute(opened, reference.case(BLOCK)) < 0)


def a_request_beside_an_order_is_right(opened: VllmEngine, client: SyncClient, reference: Reference) -> None:
    case = reference.case(6 * BLOCK + 3)
    evicted_from_device_and_host(opened, client, reference, case)
    client.start_prefetch(pb.PromptPages(tokens=case.prompt))
    compute(opened, case)
    wait_until(lambda: not client.list_operations(open_only=True))
    assert opened.is_empty()
    assert used(client)[:2] == (0, CHUNKS)


def test_the_first_token_of_a_warmed_prompt_comes_sooner_than_of_one_that_is_computed(
    folder: Path, registry: str
) -> None:
    reference = Reference(folder / "sooner", first_tokens.SIZE)
    longest = 2 * first_tokens.TOKENS
    stored = tier(storage="file", storage_config={"path": str(folder / "tier-sooner")})
    # Of the tiny model, whose tokens are a quarter as large.
    chunks = 2 * 4 * longest // BLOCK
    sizes = {
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
        "num_gpu_blocks_override": 2 * longest // BLOCK + 1,
        "kv_transfer_config": offloading(chunks, stored, orders("P-sooner", registry)),
    }
    opened = VllmEngine("sooner", folder, {**vllm_arguments(reference.path, 1), **sizes})
    try:
        opened.wait_ready()
        with SyncClient(address(registry, "P-sooner")) as router:
            first_tokens.come_sooner(opened, router, reference, folder / "tier-sooner", BLOCK)
    finally:
        opened.close()


def test_a_routers_token_is_for_prefetches_of_its_own(folder: Path, reference: Reference, registry: str) -> None:
    tokens = folder / "tokens"
    tokens.write_text(f"operator:{secret('operator')}\nconsumer router-a:{secret('router')}\n")
    first, second = (reference.case(6 * BLOCK + 3) for _ in range(2))
    prompt = pb.PromptPages(tokens=first.prompt)
    with engine(folder, reference.path, registry, "P-tokens", tokens_file=str(tokens)) as opened:
        where = address(registry, "P-tokens")
        with SyncClient(where) as stranger, pytest.raises(CredentialsInvalid):
            stranger.start_prefetch(prompt)
        operator, consumer = (SyncClient(where, security=proof(name)) for name in ("operator", "router"))
        with operator, consumer:
            evicted_from_device_and_host(opened, operator, reference, first)
            operators = operator.start_prefetch(prompt)
            for refused in (
                lambda: consumer.terminate_prefetch(operators.operation_id),
                lambda: consumer.start_backup(prompt),
                lambda: consumer.pin_pages(prompt, 60),
                lambda: consumer.drain(),
            ):
                with pytest.raises(PermissionDenied):
                    refused()
            assert ended(operator, operators).completed_pages == 6
            evicted_from_device_and_host(opened, operator, reference, second)
            own = ended(consumer, consumer.start_prefetch(pb.PromptPages(tokens=second.prompt)))
            assert (own.state, own.completed_pages) == (pb.OPERATION_STATE_DONE, 6)
        assert compute(opened, second) == 6 * BLOCK
        assert opened.is_empty()
