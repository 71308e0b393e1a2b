"""Orders for models with sliding windows, whose layers vLLM keeps in groups: its own manager and tiers, as in
test_vllm_orders.py, and its own look-up of what a request finds."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_sliding_window_size_in_chunks
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import LookupResult, OffloadingKVEventsConfig, OffloadKey, RequestOffloadingContext
from vllm.v1.kv_offload.config import OffloadingGroupConfig

from kvgrpc.client import SyncClient
from kvgrpc.engines.vllm.offload.keys import ChunkNames
from kvgrpc.engines.vllm.offload.windows import WindowChunks
from kvgrpc.errors import FeatureDisabled
from kvgrpc.hashing import each_block_hash
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

WINDOWS = (2, 3)
PAGES = 5
TOKENS = prompt(PAGES)
WHOLE = keys_of(TOKENS)
# An order may take all of the host.
WINDOWED: dict[str, Any] = {"windows": WINDOWS, "limits": {"occupancy": 1.0}}
# All that vLLM keeps of that prompt; and of it what a request for the whole prompt takes.
ALL = [key for group in range(3) for key in keys_of(TOKENS, group)]
NEEDED = WHOLE + keys_of(TOKENS, 1)[-2:] + keys_of(TOKENS, 2)[-3:]


def pages(client: SyncClient) -> tuple[int, int]:
    """Of the prompt, that a request finds in the host, and there or in storage."""
    found = client.lookup(pb.PromptPages(tokens=TOKENS))
    return found.host_pages, found.storage_pages


def in_host(engine: Offloading, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
    return [key for key in keys if engine.request([key])]


def test_an_order_brings_the_last_chunks_of_each_window_and_no_others(tmp_path: Path) -> None:
    with offloading(tmp_path, **WINDOWED) as (engine, client):
        engine.compute(ALL)
        assert pages(client) == (PAGES, PAGES)
        engine.empty_host()
        assert pages(client) == (0, PAGES)
        operation = ended(client, start(client, TOKENS))
        assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DONE, PAGES)
        assert operation.bytes == len(NEEDED) * CHUNK_BYTES
        assert in_host(engine, ALL) == NEEDED and pages(client) == (PAGES, PAGES)
        engine.wait(engine.nothing_is_held)
        engine.wait(lambda: row(client, operation).used_pages == PAGES)
        operation = ended(client, start(client, TOKENS))
        assert (operation.state, operation.stop) == (pb.OPERATION_STATE_DECLINED, pb.OPERATION_STOP_COVERED)


@pytest.mark.parametrize(
    ("group", "lost", "left"),
    [(1, 4, 4), (2, 2, 2), (1, 2, PAGES), (0, 3, 3)],
    ids=["of the last window", "within one", "before all", "of the other layers"],
)
def test_what_storage_lost_ends_the_prompt_where_a_request_finds_its_end(
    tmp_path: Path, group: int, lost: int, left: int
) -> None:
    """``left`` pages of all, where one chunk of a group is lost: none that a window has left behind is missed."""
    gone = keys_of(TOKENS, group)[lost]
    with offloading(tmp_path, **WINDOWED) as (engine, client):
        engine.compute([key for key in ALL if key != gone])
        engine.empty_host()
        assert pages(client) == (0, left)
        operation = ended(client, start(client, TOKENS))
        assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DONE, left)
        assert pages(client) == (left, left)
        engine.wait(engine.nothing_is_held)


def test_windows_that_the_host_lost_alone_are_brought(tmp_path: Path) -> None:
    """Without them a request finds nothing of what the host has."""
    with offloading(tmp_path, **WINDOWED) as (engine, client):
        engine.compute(ALL)
        engine.empty_host()
        engine.compute(WHOLE)
        assert pages(client) == (0, PAGES)
        operation = ended(client, start(client, TOKENS))
        assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DONE, PAGES)
        assert operation.bytes == sum(WINDOWS) * CHUNK_BYTES and pages(client) == (PAGES, PAGES)


def test_an_order_leaves_room_for_the_windows_of_what_it_brings(tmp_path: Path) -> None:
    """Of half of the host, sixteen chunks, two are for the window."""
    tokens = prompt(12)
    with offloading(tmp_path, windows=(2,), limits={"occupancy": 0.5}) as (engine, client):
        engine.compute(keys_of(tokens))
        engine.compute(keys_of(tokens, 1))
        engine.empty_host()
        operation = ended(client, start(client, tokens))
        assert (operation.state, operation.stop) == (pb.OPERATION_STATE_DONE, pb.OPERATION_STOP_CAPACITY)
        assert operation.completed_pages == CHUNKS // 2 - 2 and operation.bytes == CHUNKS // 2 * CHUNK_BYTES
        assert client.lookup(pb.PromptPages(tokens=tokens)).host_pages == CHUNKS // 2 - 2


def test_an_order_that_is_cut_while_windows_come_has_what_they_are_there_for_and_holds_nothing(tmp_path: Path) -> None:
    """The host has the whole prompt but for the windows, of which storage does not say whether it has them."""
    with offloading(tmp_path, **WINDOWED) as (engine, client):
        engine.compute(ALL)
        engine.empty_host()
        engine.compute(WHOLE + keys_of(TOKENS, 1)[:2] + keys_of(TOKENS, 2)[:2])
        store = SlowStore(engine, late=ALL)
        operation = start(client, TOKENS)
        engine.wait(lambda: row(client, operation).covered_pages == PAGES)
        with SyncClient(engine.address, timeout=1.0) as hasty:
            hasty.terminate_prefetch(operation.operation_id)
        engine.wait(lambda: row(client, operation).quiescent)  # and not for the store's answer, which never comes
        operation = row(client, operation)
        assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_CANCELLED, 2)
        engine.wait(lambda: engine.nothing_is_held() and not engine.manager.has_pending_work())
        store.let_go()
        assert ended(client, start(client, TOKENS)).completed_pages == PAGES


def test_an_order_that_is_cut_ends_when_nothing_of_a_window_moves(tmp_path: Path) -> None:
    with offloading(tmp_path, **WINDOWED) as (engine, client):
        engine.compute(ALL)
        engine.empty_host()
        engine.compute(WHOLE)
        store = SlowStore(engine, late=[])
        operation = start(client, TOKENS)
        engine.wait(store.reading.is_set)
        with SyncClient(engine.address, timeout=1.0) as hasty:
            assert not hasty.terminate_prefetch(operation.operation_id).quiescent
        assert not engine.nothing_is_held()
        store.hands_over.set()
        operation = ended(client, operation)
        assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_CANCELLED, PAGES)
        engine.wait(engine.nothing_is_held)


def test_an_order_ends_when_what_it_needs_no_more_has_come(tmp_path: Path) -> None:
    """Of one window the last chunk comes, of the other storage has none: the prompt ends before it."""
    first, second = (keys_of(TOKENS, group) for group in (1, 2))
    with offloading(tmp_path, **WINDOWED) as (engine, client):
        engine.compute([key for key in ALL if key != second[-1]])
        engine.empty_host()
        engine.compute(WHOLE + first[:-1] + second[:-1])
        store = SlowStore(engine, late=[])
        operation = start(client, TOKENS)
        engine.wait(lambda: store.reading.is_set() and row(client, operation).covered_pages == PAGES - 1)
        assert pages(client) == (PAGES - 1, PAGES - 1)
        assert not row(client, operation).quiescent and not engine.nothing_is_held()
        store.hands_over.set()
        operation = ended(client, operation)
        assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DECLINED, PAGES - 1)
        engine.wait(engine.nothing_is_held)


def test_an_emptied_host_ends_an_order_whose_windows_come(tmp_path: Path) -> None:
    with offloading(tmp_path, **WINDOWED) as (engine, client):
        engine.compute(ALL)
        engine.empty_host()
        engine.compute(WHOLE)
        store = SlowStore(engine, late=ALL)
        operation = start(client, TOKENS)
        engine.wait(lambda: row(client, operation).covered_pages == PAGES)
        engine.empty_host()
        store.let_go()
        operation = ended(client, operation)
        assert (operation.stop, operation.completed_pages) == (pb.OPERATION_STOP_PAGE_LOST, 0)
        assert ended(client, start(client, TOKENS)).completed_pages == PAGES


class Host:
    """A manager of vLLM's that has these chunks."""

    lock = contextlib.nullcontext()

    def __init__(self, there: Collection[OffloadKey]) -> None:
        self.there = there

    def on_new_request(self, context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, context: Any = None) -> LookupResult:
        return LookupResult.HIT if key in self.there else LookupResult.MISS


def found_by_vllm(windows: Sequence[int], tokens: int, hashes: Sequence[bytes], there: Collection[OffloadKey]) -> int:
    """Tokens of a prompt of that length, of layers with these windows in chunks, that vLLM's scheduler would load."""
    kind: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs = [
        FullAttentionSpec(**kind),
        *(SlidingWindowSpec(**kind, sliding_window=window * BLOCK) for window in windows),
    ]
    groups = [KVCacheGroupSpec([f"layer-{number}"], spec) for number, spec in enumerate(specs)]
    chunks = [get_sliding_window_size_in_chunks(spec, BLOCK) for spec in specs]
    assert chunks == [None, *windows]
    spec = SimpleNamespace(
        config=SimpleNamespace(groups=[OffloadingGroupConfig(BLOCK, ("layer",), *each) for each in enumerate(chunks)]),
        tokens_per_block=[BLOCK] * len(specs),
        blocks_per_chunk=1,
        tokens_per_hash=BLOCK,
        offload_prompt_only=True,
        extra_config={},
        kv_events_config=OffloadingKVEventsConfig(False, False),
        get_manager=lambda: Host(there),
    )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, world_size=1),
        speculative_config=None,
    )
    caches = SimpleNamespace(kv_cache_groups=groups, cache_hit_alignment_tokens=None)
    scheduler: Any = OffloadingConnectorScheduler(spec, config, caches)
    request: Any = SimpleNamespace(
        request_id="r",
        num_tokens=tokens,
        block_hashes=list(hashes),
        kv_transfer_params=None,
        kv_hints=None,
        skip_reading_prefix_cache=False,
    )
    scheduler.on_new_request(request)
    found: tuple[int, bool] = scheduler.get_num_new_matched_tokens(request, 0)
    return found[0]


def test_what_is_there_is_as_much_as_vllm_finds() -> None:
    """Of random chunks: by what Lookup answers, and by what an order has brought."""
    rng, several = random.Random(0), set[int]()
    for _ in range(400):
        size, windows = rng.randrange(1, 12), [rng.randrange(1, 6) for _ in range(rng.randrange(1, 4))]
        own = list(each_block_hash(prompt(size), BLOCK))
        names, hashes = chunk_names(None, *windows), [each.hex() for each in own]
        share = rng.choice((0.7, 0.9, 0.97))
        groups = range(len(windows) + 1)
        there = {names.key(each, group) for group in groups for each in hashes if rng.random() < share}
        found = found_by_vllm(windows, size * BLOCK + 1, own, there)

        def present(keys: Sequence[OffloadKey], there: Collection[OffloadKey] = there) -> list[bool]:
            return [key in there for key in keys]

        leading = [*present(names.keys(hashes)), False].index(False)
        assert names.usable(hashes, leading, 0, present) * BLOCK == found, (windows, size)
        look = Host(there).lookup
        brought = WindowChunks(names, hashes).step(leading, lambda key, page: look(key), 10_000)  # noqa: B023
        assert brought == (found // BLOCK, True)
        several.add(found // BLOCK)
    assert len(several) > 8, "the draw had next to no windows with gaps"


@pytest.mark.parametrize(("looks", "steps"), [(512, 2), (40, 6)])
def test_a_slow_tier_is_asked_at_once_for_all_windows_that_it_may_lack(looks: int, steps: int) -> None:
    """As vLLM asks it, for it has the end of a shorter prompt; a step looks no more often than it may."""
    names, hashes = chunk_names(None, 2), [each.hex() for each in each_block_hash(prompt(100), BLOCK)]
    there = [names.key(each, 1) for each in hashes[28:30]]
    seen, chunks, pages, over, looked = set[OffloadKey](), WindowChunks(names, hashes), 100, False, list[int]()

    def look(key: OffloadKey, page: int) -> LookupResult:
        looked[-1] += 1
        if key not in seen:
            seen.add(key)
            return LookupResult.RETRY
        return LookupResult.HIT if key in there else LookupResult.MISS

    while not over:
        looked.append(0)
        pages, over = chunks.step(pages, look, looks)
    assert pages == 30 and len(looked) <= steps and max(looked) <= looks


def chunk_names(*windows: int | None, sizes: Sequence[int] = (BLOCK,) * 8, config: Any = None) -> ChunkNames:
    groups = [
        SimpleNamespace(group_id=number, tokens_per_block=size, sliding_window_size_in_chunks=window)
        for number, (window, size) in enumerate(zip(windows, sizes, strict=False))
    ]
    cache = SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=BLOCK)
    return ChunkNames(SimpleNamespace(config=SimpleNamespace(groups=groups, cache=cache)), config)


def test_models_of_other_groups_are_refused() -> None:
    states = SimpleNamespace(model_config=SimpleNamespace(has_inner_state=True))
    drafts = SimpleNamespace(speculative_config=object())
    for what, windows, more in (
        ("0 groups of layers that see the whole prompt", (4,), {}),
        ("2 groups of layers that see the whole prompt", (None, None), {}),
        ("groups of layers with blocks of other sizes", (None, 4), {"sizes": (BLOCK, 2 * BLOCK)}),
        ("layers that keep a state", (None, 1), {"config": states}),
        ("sliding windows and drafts", (None, 4), {"config": drafts}),
    ):
        with pytest.raises(FeatureDisabled, match=rf"{what} are not built; use a model whose layers are of full"):
            chunk_names(*windows, **more)
    assert chunk_names(None, config=states).windows == chunk_names(None, config=drafts).windows == ()


def test_an_engine_with_windows_lends_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(FeatureDisabled, match="chunks of an engine with sliding windows are not lent"),
        offloading(tmp_path, windows=WINDOWS, pull={"staging_pages": 8}),
    ):
        pass
