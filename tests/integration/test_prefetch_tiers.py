"""Pages through all three tiers with torch: device, host, a file, and back on the order of a remote client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgrpc.client import SyncClient
from kvgrpc.prefetch.copies.engine import CopyEngine
from kvgrpc.prefetch.model import NotEnoughPages, WritePolicy
from kvgrpc.prefetch.pools.device import DevicePool
from kvgrpc.prefetch.pools.shape import Component, HostLayout, PageShape
from kvgrpc.prefetch.tree.cache import TieredCache
from kvgrpc.v1 import prefetch_service_pb2 as pb
from tests.support.cache_serving import LIMITS, PAGE_TOKENS, CacheRank, hashes_of, open_cache_rank, prompt
from tests.support.waiting import wait_until

SHAPES = {
    "mha": PageShape.mha(layers=4, page_tokens=PAGE_TOKENS, heads=2, head_dim=16, dtype="bfloat16"),
    "mla": PageShape.mla(layers=4, page_tokens=PAGE_TOKENS, latent_dim=24, dtype="float8_e4m3fn", indexer_bytes=3),
    # Whatever a page may have, and a state that does not divide into tokens.
    "state": PageShape(
        4, PAGE_TOKENS, tuple(map(Component, ("k", "v", "latent", "indexer", "state"), (64, 64, 48, 12, 7)))
    ),
}
PAGES = 24


@pytest.fixture(
    params=[("mha", layout) for layout in HostLayout]
    + [("mla", HostLayout.PAGE_FIRST), ("state", HostLayout.PAGE_FIRST)],
    ids=str,
)
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CacheRank]:
    kind, layout = request.param
    shape = SHAPES[kind]
    opened = open_cache_rank(
        tmp_path,
        shape=shape,
        host_layout=layout,
        device=DevicePool.allocate(shape, PAGES),
        write_policy=WritePolicy.WRITE_THROUGH,
        limits=LIMITS,
    )
    yield opened
    opened.close()


def parts(cache: CacheRank) -> tuple[TieredCache, CopyEngine]:
    copies = cache.manager.copies
    assert copies is not None
    return cache.manager.known_cache(), copies


def content(copies: CopyEngine, pages: Any) -> list[torch.Tensor]:
    """The bytes of device pages, over all layers and components."""
    index = torch.as_tensor(pages)
    shape = copies.host.shape
    return [copies.device.rows(layer, c.name)[index].clone() for layer in range(shape.layers) for c in shape.components]


def compute(copies: CopyEngine, pages: Any) -> None:
    """What an engine would: every byte of the pages is new."""
    index = torch.as_tensor(pages)
    shape = copies.host.shape
    for layer in range(shape.layers):
        for component in shape.components:
            rows = copies.device.rows(layer, component.name)
            rows[index] = torch.randint(0, 256, (len(index), rows.shape[1]), dtype=torch.uint8)


def test_a_prompt_leaves_all_tiers_but_storage_and_comes_back_layer_by_layer(tiers: CacheRank) -> None:
    cache, copies = parts(tiers)
    tokens = prompt(20)
    hashes = hashes_of(tokens)
    pages = cache.take_device(20)
    assert not isinstance(pages, NotEnoughPages)
    compute(copies, pages)
    before = content(copies, pages)
    cache.insert(hashes, pages.tolist())
    assert copies.wait_idle(20.0)
    wait_until(lambda: [row.state.name for row in tiers.manager.controller.book.all()] == ["DONE"])
    assert cache.evict_device(PAGES) == 20 and cache.evict_host(64) == 20
    for layer in range(copies.host.shape.layers):
        for component in copies.host.shape.components:
            copies.device.rows(layer, component.name).zero_()

    with SyncClient(tiers.address) as client:
        operation = client.start_prefetch(pb.PromptPages(tokens=tokens))
        for message in client.watch_operations([operation.operation_id]):
            for each in message.operations:
                operation = each
        assert operation.state == pb.OPERATION_STATE_DONE
        found = client.lookup(pb.PromptPages(tokens=tokens))
        assert (found.device_pages, found.host_pages, found.storage_pages) == (0, 20, 20)

    held = cache.match(hashes)
    loaded = cache.load(held)
    signal = cache.start_loading()
    assert signal is not None
    per_layer = len(copies.host.shape.components)
    for layer in range(signal.layers):
        signal.wait(layer, 20.0)
        there = content(copies, loaded)[layer * per_layer : (layer + 1) * per_layer]
        assert all(map(torch.equal, there, before[layer * per_layer : (layer + 1) * per_layer]))
    assert copies.wait_idle(20.0)
    cache.release(held)
    assert cache.leading_by_tier(hashes) == (20, 20)


def test_a_device_pool_is_free_again_when_its_cache_was_closed(tmp_path: Path) -> None:
    device = DevicePool.allocate(SHAPES["mha"], PAGES)
    for _ in range(2):
        opened = open_cache_rank(
            tmp_path, shape=SHAPES["mha"], device=device, write_policy=WritePolicy.WRITE_THROUGH, limits=LIMITS
        )
        cache, copies = parts(opened)
        pages = cache.take_device(PAGES)
        assert not isinstance(pages, NotEnoughPages)
        compute(copies, pages)
        cache.insert(hashes_of(prompt(PAGES)), pages.tolist())
        opened.close()
        assert device.table.free_count == PAGES
