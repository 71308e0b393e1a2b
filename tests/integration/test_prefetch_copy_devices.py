"""Copies on a device that works behind our back, as CUDA does: no page is given back while it may still be touched."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvgrpc.prefetch.copies.copy_operation import Direction
from kvgrpc.prefetch.copies.engine import CopyEngine
from kvgrpc.prefetch.copies.paths import IoBackend
from kvgrpc.prefetch.pools.pages import as_pages
from kvgrpc.prefetch.pools.shape import HostLayout, PageShape
from tests.support.copying import (
    LAYERS,
    PAGES,
    SECONDS,
    LaggingLane,
    begin,
    engine,
    fails_at_layer,
    fill,
    taken,
)


class TestDevicesThatLag:
    """A lane that works behind our back, as a CUDA stream does."""

    @pytest.mark.parametrize("direction", Direction)
    def test_pages_of_a_failed_copy_are_given_back_once_its_first_layers_have_ended(
        self, copies: CopyEngine, monkeypatch: pytest.MonkeyPatch, direction: Direction
    ) -> None:
        host = taken(copies.write(np.arange(4)))
        assert copies.wait_idle(SECONDS)
        copies.acks()
        lane = LaggingLane()
        monkeypatch.setitem(copies._lane, direction, lane)
        fails_at_layer(monkeypatch, direction, 1)
        begin(copies, direction, host)
        lane.waited.wait(SECONDS)
        counts = [pool.table.counts() for pool in (copies.host, copies.device)]
        assert copies.acks() == [] and copies.in_flight == 1
        assert (counts[0]["read"], counts[1]["reserved"]) == ((4, 4) if direction is Direction.UP else (0, 0))
        assert counts[0]["reserved"] == (0 if direction is Direction.UP else 2)
        lane.ended.set()
        assert copies.wait_idle(SECONDS)
        (ack,) = copies.acks()
        assert not ack.ok and ack.quiescent
        assert copies.host.table.free_count == PAGES - 4 and copies.device.table.free_count == PAGES

    @pytest.mark.parametrize("direction", Direction)
    def test_pages_of_a_device_that_does_not_answer_are_nobodys_again(
        self, copies: CopyEngine, monkeypatch: pytest.MonkeyPatch, direction: Direction
    ) -> None:
        host = taken(copies.write(np.arange(4)))
        assert copies.wait_idle(SECONDS)
        copies.acks()
        lane = LaggingLane(RuntimeError("an illegal memory access was encountered"))
        lane.ended.set()
        monkeypatch.setitem(copies._lane, direction, lane)
        fails_at_layer(monkeypatch, direction, 1)
        begin(copies, direction, host)
        assert copies.wait_idle(SECONDS)
        (ack,) = copies.acks()
        assert not ack.ok and not ack.quiescent and copies.healthy
        free = copies.host.table.free_count, copies.device.table.free_count
        assert free == ((PAGES - 4, PAGES - 4) if direction is Direction.UP else (PAGES - 6, PAGES))
        assert copies.close(SECONDS) and not copies.host.close(), "its memory stays mapped"

    def test_who_asks_for_a_copy_never_waits_for_the_device(
        self, copies: CopyEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lanes = {direction: LaggingLane() for direction in Direction}
        for direction, lane in lanes.items():
            lane.ended.set()
            monkeypatch.setitem(copies._lane, direction, lane)
        host = taken(copies.write(np.arange(4)))
        assert copies.wait_idle(SECONDS)
        copies.load(host)
        signal = copies.start_loading()
        assert signal is not None
        for layer in range(LAYERS):
            signal.wait(layer, SECONDS)
        assert copies.wait_idle(SECONDS)
        here = threading.get_ident()
        for lane in lanes.values():
            assert lane.fenced_by == [here], "its own stream is only marked"
            assert lane.waited_by and here not in lane.waited_by


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestCuda:
    @pytest.fixture
    def cuda(self) -> Iterator[CopyEngine]:
        made = engine(
            PageShape.mha(LAYERS, 64, 8, 128, "float16"), HostLayout.PAGE_FIRST_DIRECT, IoBackend.KERNEL, "cuda"
        )
        yield made
        made.close(SECONDS)

    def test_the_host_pool_is_page_locked_while_the_engine_is_open(self, cuda: CopyEngine) -> None:
        seen = torch.from_numpy(cuda.host.block_memory(0))
        assert seen.is_pinned()
        assert cuda.close(SECONDS)
        assert not torch.from_numpy(cuda.host.block_memory(0)).is_pinned()

    def test_a_forward_stream_reads_a_layer_only_once_it_is_there(self, cuda: CopyEngine) -> None:
        content = fill(cuda.device, np.arange(8))
        host = taken(cuda.write(np.arange(8)))
        assert cuda.wait_idle(SECONDS)
        stream = torch.cuda.Stream()
        for _ in range(20):
            cuda.device.rows(0, "k").zero_()
            cuda.load(host, device_pages=as_pages(range(8, 16)))
            signal = cuda.start_loading()
            assert signal is not None
            with torch.cuda.stream(stream):
                for layer in range(LAYERS):
                    signal.wait(layer, SECONDS)
                    assert torch.equal(cuda.device.rows(layer, "k")[8:16], content[layer, "k"])
            assert cuda.wait_idle(SECONDS)

    def test_a_write_copies_what_the_callers_stream_has_computed(self, cuda: CopyEngine) -> None:
        for value in range(20):
            torch.cuda._sleep(10_000_000)
            cuda.device.rows(0, "k").fill_(value)
            host = taken(cuda.write(np.arange(8)))
            assert cuda.wait_idle(SECONDS)
            assert (cuda.host.flat(int(host[0]))[:64] == value).all()
            cuda.evict_host(host)
