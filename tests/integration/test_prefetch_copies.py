"""Copies between device and host: the same bytes back in every layout, and an end that is told, whatever happens."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from kvgrpc.errors import CopyFailed, InvalidRequest, PageStateInvalid, TooManyRequests
from kvgrpc.prefetch.copies.copy_operation import Direction
from kvgrpc.prefetch.copies.engine import CopyEngine
from kvgrpc.prefetch.copies.paths import CopyPath, IoBackend
from kvgrpc.prefetch.model import NotEnoughPages
from kvgrpc.prefetch.pools.device import DevicePool
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages, PageState, as_pages
from kvgrpc.prefetch.pools.shape import HostLayout, PageShape
from tests.support.copying import (
    LAYERS,
    PAGES,
    SECONDS,
    engine,
    fill,
    shape_of,
    taken,
)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float32": torch.float32,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", IoBackend)
@pytest.mark.parametrize("layout", HostLayout)
@pytest.mark.parametrize(("kind", "dtype"), [("mha", "bfloat16"), ("mla", "float8_e4m3fn"), ("state", "float16")])
def test_pages_come_back_as_they_were_and_touch_no_others(
    kind: str, dtype: str, layout: HostLayout, backend: IoBackend, device: str
) -> None:
    made = engine(shape_of(kind, dtype), layout, backend, device)
    for pages in (np.arange(6), np.array([9, 2, 3, 14, 0, 7]), np.array([5])):
        everything = fill(made.device, np.arange(PAGES))
        host = taken(made.write(pages))
        assert made.wait_idle(SECONDS)
        target = np.array([15, 1, 4, 5, 12, 8])[: len(pages)]
        made.load(host, device_pages=target)
        signal = made.start_loading()
        assert signal is not None
        for layer in range(LAYERS):
            signal.wait(layer, SECONDS)
        assert made.wait_idle(SECONDS)
        others = np.setdiff1d(np.arange(PAGES), target)
        for name, before in everything.items():
            rows = made.device.rows(*name)
            assert torch.equal(rows[torch.from_numpy(target)], before[torch.from_numpy(pages)])
            assert torch.equal(rows[torch.from_numpy(others)], before[torch.from_numpy(others)])
        made.evict_host(host)
    assert made.close(SECONDS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_engines_own_tensors_of_any_dtype_are_taken_as_they_are(dtype: str) -> None:
    shape = PageShape.mha(1, 4, 2, 8, dtype)
    tensors = {(0, name): torch.randn(PAGES * 4, 2, 8).to(DTYPES[dtype]) for name in "kv"}
    pool = DevicePool(shape, PAGES, tensors)
    tensors[0, "k"][4:8] = 0
    assert not pool.rows(0, "k")[1].any() and pool.rows(0, "k")[2].any()


def test_tensors_that_do_not_fit_the_shape_are_named() -> None:
    shape = PageShape.mha(1, 4, 2, 8, "float16")
    with pytest.raises(InvalidRequest) as refused:
        DevicePool(shape, PAGES, {(0, "k"): torch.zeros(PAGES * 4, 2, 8), (0, "v"): torch.zeros(1)})
    assert refused.value.metadata["field"] == "tensors[0, k]"
    with pytest.raises(InvalidRequest):
        CopyPath(DevicePool.allocate(shape, 2), HostPool(PageShape.mha(2, 4, 2, 8, "float16"), 2))


class TestPagesOfCopies:
    def test_a_full_host_says_how_many_are_missing_and_nothing_is_taken(self, copies: CopyEngine) -> None:
        taken(copies.write(np.arange(10)))
        assert copies.write(np.arange(10)) == NotEnoughPages(4)
        assert copies.wait_idle(SECONDS) and copies.host.table.free_count == 6

    def test_a_full_device_says_so_and_the_host_pages_are_not_locked(self, copies: CopyEngine) -> None:
        host = taken(copies.write(np.arange(4)))
        assert copies.wait_idle(SECONDS)
        copies.device.table.take(PAGES - 1)
        assert copies.load(host) == NotEnoughPages(3)
        assert copies.evict_host(host) == 4

    def test_a_device_page_is_evicted_only_once_the_host_has_it(self, copies: CopyEngine) -> None:
        device = taken(copies.device.table.take(3))
        copies.device.table.commit(device)
        reserved = taken(copies.host.table.take(3))
        with pytest.raises(PageStateInvalid):
            copies.evict_device(device, reserved)
        copies.host.table.release(reserved)
        host = taken(copies.write(device))
        assert copies.wait_idle(SECONDS)
        assert copies.evict_device(device, host) == 3
        assert copies.device.table.free_count == PAGES

    def test_a_host_page_is_not_evicted_while_it_is_loaded(self, copies: CopyEngine) -> None:
        host = taken(copies.write(np.arange(3)))
        assert copies.wait_idle(SECONDS)
        copies.load(host)
        with pytest.raises(PageStateInvalid):
            copies.evict_host(host)
        copies.start_loading()
        assert copies.wait_idle(SECONDS) and copies.evict_host(host) == 3

    def test_pages_of_no_pool_are_refused_before_anything_is_taken(self, copies: CopyEngine) -> None:
        with pytest.raises(InvalidRequest):
            copies.write([PAGES])
        with pytest.raises(InvalidRequest):
            copies.write([-1])
        assert copies.host.table.free_count == PAGES and copies.in_flight == 0


class TestEnds:
    def test_every_copy_is_acknowledged_once_whatever_its_node(self, copies: CopyEngine) -> None:
        for node in (0, None, "x", 0):
            taken(copies.write(np.arange(2), node=node))
        assert copies.wait_idle(SECONDS)
        acks = copies.acks()
        assert [ack.node for ack in acks] == [0, None, "x", 0] and all(ack.ok for ack in acks)
        assert acks[0].nbytes == 2 * copies.host.shape.page_bytes and copies.acks() == []

    def test_loads_that_wait_are_one_and_each_start_has_a_signal_of_its_own(self, copies: CopyEngine) -> None:
        host = taken(copies.write(np.arange(8)))
        assert copies.wait_idle(SECONDS)
        copies.acks()
        signals = []
        for first in range(0, 8, 2):
            copies.load(host[first : first + 1], node=first)
            copies.load(host[first + 1 : first + 2], node=first + 1)
            signals.append(copies.start_loading())
        assert copies.start_loading() is None
        for signal in signals:
            assert signal is not None
            for layer in range(LAYERS):
                signal.wait(layer, SECONDS)
        assert copies.wait_idle(SECONDS)
        nodes: list[Any] = [ack.node for ack in copies.acks()]
        assert sorted(nodes) == list(range(8))

    def test_a_failed_load_ends_the_wait_and_gives_the_pages_back(
        self, copies: CopyEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        host = taken(copies.write(np.arange(4)))
        assert copies.wait_idle(SECONDS)
        copies.acks()
        up = CopyPath.up

        def broken(self: CopyPath, layer: int, *pages: Pages) -> None:
            if layer == 1:
                raise RuntimeError("the device fell off the bus")
            up(self, layer, *pages)

        with monkeypatch.context() as patched:
            patched.setattr(CopyPath, "up", broken)
            copies.load(host)
            signal = copies.start_loading()
            assert signal is not None
            signal.wait(0, SECONDS)
            with pytest.raises(CopyFailed, match="fell off the bus"):
                signal.wait(1, SECONDS)
            assert copies.wait_idle(SECONDS)
        (ack,) = copies.acks()
        assert not ack.ok and ack.nbytes == 0
        assert copies.device.table.free_count == PAGES and copies.evict_host(host) == 4
        assert copies.healthy

    def test_a_failed_write_gives_its_host_pages_back_and_harms_no_other(
        self, copies: CopyEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        down = CopyPath.down
        gate = threading.Event()

        def broken(self: CopyPath, layer: int, device: Pages, host: Pages) -> None:
            gate.wait(SECONDS)
            if 7 in device:
                raise RuntimeError("no such page")
            down(self, layer, device, host)

        monkeypatch.setattr(CopyPath, "down", broken)
        content = fill(copies.device, np.arange(PAGES))
        first, bad, good = (taken(copies.write(pages)) for pages in ([0], [6, 7], [1, 2]))
        gate.set()
        assert copies.wait_idle(SECONDS)
        assert [ack.ok for ack in copies.acks()] == [True, False, True]
        assert {copies.host.table.state(page) for page in (*first, *good)} == {PageState.PRESENT}
        assert copies.host.table.counts()["present"] == 3 and len(bad) == 2
        copies.load(good, device_pages=as_pages([14, 15]))
        copies.start_loading()
        assert copies.wait_idle(SECONDS)
        assert torch.equal(copies.device.rows(1, "k")[14:16], content[1, "k"][1:3])

    def test_a_wait_for_a_layer_ends_at_its_time(self, copies: CopyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        host = taken(copies.write(np.arange(2)))
        assert copies.wait_idle(SECONDS)
        gate = threading.Event()
        monkeypatch.setattr(CopyPath, "up", lambda *arguments: gate.wait(SECONDS))
        copies.load(host)
        signal = copies.start_loading()
        assert signal is not None
        began = time.monotonic()
        with pytest.raises(CopyFailed, match="within nan s"):
            signal.wait(0, math.nan)
        with pytest.raises(CopyFailed) as refused:
            signal.wait(0, 0.05)
        assert refused.value.metadata == {"direction": "load", "layer": "0"} and time.monotonic() - began < SECONDS / 2
        gate.set()
        signal.wait(LAYERS - 1, SECONDS)

    def test_closing_ends_what_waits_and_frees_its_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        copies = engine(shape_of("mha", "float16"), HostLayout.LAYER_FIRST, IoBackend.DIRECT)
        host = taken(copies.write(np.arange(2)))
        assert copies.wait_idle(SECONDS)
        copies.load(host)
        assert copies.close(SECONDS)
        assert [ack.ok for ack in copies.acks()] == [True, False]
        assert copies.device.table.free_count == PAGES and copies.in_flight == 0
        assert copies.evict_host(host) == 2 and copies.host.close()

    def test_a_load_after_the_end_is_refused_and_takes_nothing(self) -> None:
        copies = engine(shape_of("mha", "float16"), HostLayout.LAYER_FIRST, IoBackend.DIRECT)
        host = taken(copies.write(np.arange(2)))
        assert copies.wait_idle(SECONDS) and copies.close(SECONDS)
        with pytest.raises(TooManyRequests):
            copies.load(host)
        assert copies.device.table.free_count == PAGES and copies.in_flight == 0
        assert copies.evict_host(host) == 2 and copies.host.close()

    def test_a_device_that_says_nothing_of_its_streams_costs_no_page(
        self, copies: CopyEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken() -> None:
            raise RuntimeError("the device is gone")

        host = taken(copies.write(np.arange(2)))
        assert copies.wait_idle(SECONDS)
        before = copies.host.table.counts(), copies.device.table.counts()
        for direction in Direction:
            monkeypatch.setattr(copies._lane[direction], "fence", broken)
        with pytest.raises(RuntimeError):
            copies.write(np.arange(2))
        with pytest.raises(RuntimeError):
            copies.load(host)
        assert (copies.host.table.counts(), copies.device.table.counts()) == before
