"""Copies between device and host: the same bytes back in every layout, and an end that is told, whatever happens."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvgrpc.errors import CopyFailed, InvalidRequest, PageStateInvalid, TooManyRequests
from kvgrpc.prefetch.copies import engine as copies_engine
from kvgrpc.prefetch.copies.copy_operation import CopyOperation, Direction, merge
from kvgrpc.prefetch.copies.engine import CopyEngine
from kvgrpc.prefetch.copies.paths import CopyPath, IoBackend
from kvgrpc.prefetch.model import NotEnoughPages
from kvgrpc.prefetch.pools.device import DevicePool
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages, as_pages
from kvgrpc.prefetch.pools.shape import Component, HostLayout, PageShape
from tests.support.waiting import wait_until

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float32": torch.float32,
}
PAGES, LAYERS = 16, 3
SECONDS = 20.0


def shape_of(kind: str, dtype: str) -> PageShape:
    if kind == "mha":
        return PageShape.mha(LAYERS, 4, 2, 8, dtype)
    if kind == "state":
        sizes = {"k": 64, "v": 64, "latent": 48, "indexer": 12, "state": 7}
        return PageShape(LAYERS, 4, tuple(Component(*each) for each in sizes.items()), dtype)
    return PageShape.mla(LAYERS, 4, 20, dtype, indexer_bytes=3)


def engine(shape: PageShape, layout: HostLayout, backend: IoBackend, device: str = "cpu", **options: Any) -> CopyEngine:
    return CopyEngine(
        DevicePool.allocate(shape, PAGES, device), HostPool(shape, PAGES, layout), backend=backend, **options
    )


def fill(pool: DevicePool, pages: Pages) -> dict[tuple[int, str], torch.Tensor]:
    content = {}
    index = torch.from_numpy(pages)
    for layer in range(pool.shape.layers):
        for component in pool.shape.components:
            rows = pool.rows(layer, component.name)
            rows[index] = torch.randint(0, 256, (len(pages), rows.shape[1]), dtype=torch.uint8, device=rows.device)
            content[layer, component.name] = rows[index].clone()
    return content


def taken(answer: Pages | NotEnoughPages) -> Pages:
    assert not isinstance(answer, NotEnoughPages)
    return answer


@pytest.fixture
def copies() -> Iterator[CopyEngine]:
    made = engine(shape_of("mha", "float16"), HostLayout.PAGE_FIRST_DIRECT, IoBackend.KERNEL)
    yield made
    made.close(SECONDS)


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
        assert copies.host.table.all_present(np.concatenate([first, good]))
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


def test_pieces_merge_in_order_of_host_pages() -> None:
    one = CopyOperation(1, Direction.DOWN, as_pages([5, 6]), as_pages([2, 9]))
    two = CopyOperation(2, Direction.DOWN, as_pages([1]), as_pages([3]))
    device, host = merge([one, two])
    assert (device.tolist(), host.tolist()) == ([5, 1, 6], [2, 3, 9])
    first = one.next_piece(1)
    one.done += 1
    second = one.next_piece(1)
    assert [(p.device_pages.tolist(), p.host_pages.tolist()) for p in (first, second)] == [([5], [2]), ([6], [9])]


class TestOrder:
    """Large writes go piece by piece, and urgent copies first."""

    @pytest.fixture
    def pieces(self) -> Iterator[CopyEngine]:
        made = engine(shape_of("mha", "float16"), HostLayout.PAGE_FIRST_DIRECT, IoBackend.KERNEL, piece_pages=2)
        yield made
        made.close(SECONDS)

    def test_an_urgent_write_comes_after_the_piece_that_is_on_its_way(
        self, pieces: CopyEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = Held(monkeypatch, "down")
        content = fill(pieces.device, np.arange(PAGES))
        large = taken(pieces.write(np.arange(7), node="large"))
        held.begun.wait(SECONDS)
        taken(pieces.write([12, 13, 14], node="urgent", priority=-5))
        taken(pieces.write([15], node="later", priority=5))
        held.gate.set()
        assert pieces.wait_idle(SECONDS)
        assert held.device_pages == [[0, 1], [12, 13], [2, 14], [3, 4], [5, 6], [15]]
        assert [ack.node for ack in pieces.acks()] == ["urgent", "large", "later"]
        for page, host in enumerate(large):
            k = content[0, "k"][page]
            assert (pieces.host.flat(int(host))[: len(k)] == k.numpy()).all()

    def test_a_piece_waits_for_the_streams_of_its_own_writes_only(
        self, pieces: CopyEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = Held(monkeypatch, "down")
        computed, waited = threading.Event(), []

        class Fence:
            def wait_on_stream(self) -> None:
                waited.append(list(held.device_pages))
                assert computed.wait(SECONDS)

        taken(pieces.write([0, 1], node="first"))
        assert held.begun.wait(SECONDS)
        taken(pieces.write([2, 3], node="second"))
        with monkeypatch.context() as patched:
            patched.setattr(pieces._lane[Direction.DOWN], "fence", Fence)
            taken(pieces.write([4, 5], node="not computed yet"))
        held.gate.set()
        wait_until(lambda: waited)
        assert waited == [[[0, 1], [2, 3]]] and [ack.node for ack in pieces.acks()] == ["first", "second"]
        computed.set()
        assert pieces.wait_idle(SECONDS)
        assert [ack.node for ack in pieces.acks()] == ["not computed yet"]

    def test_the_seconds_of_an_ack_are_those_of_all_pieces(
        self, pieces: CopyEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        down = CopyPath.down

        def slow_at_first(self: CopyPath, layer: int, device: Pages, host: Pages) -> None:
            if 0 in device:
                time.sleep(0.1)  # the device itself
            down(self, layer, device, host)

        monkeypatch.setattr(CopyPath, "down", slow_at_first)
        taken(pieces.write(np.arange(8)))
        assert pieces.wait_idle(SECONDS)
        (ack,) = pieces.acks()
        assert ack.seconds >= 0.1 * LAYERS

    def test_a_piece_that_fails_fails_its_write_and_no_other(
        self, pieces: CopyEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        down = CopyPath.down

        def broken(self: CopyPath, layer: int, device: Pages, host: Pages) -> None:
            if 6 in device:
                raise RuntimeError("no such page")
            down(self, layer, device, host)

        monkeypatch.setattr(CopyPath, "down", broken)
        taken(pieces.write(np.arange(8), node="bad"))
        good = taken(pieces.write([8, 9, 10], node="good"))
        assert pieces.wait_idle(SECONDS)
        assert {ack.node: ack.ok for ack in pieces.acks()} == {"bad": False, "good": True}
        assert pieces.host.table.all_present(good) and pieces.host.table.counts()["present"] == 3

    def test_closing_between_two_pieces_ends_the_write_and_frees_its_pages(
        self, pieces: CopyEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = Held(monkeypatch, "down")
        taken(pieces.write(np.arange(8)))
        held.begun.wait(SECONDS)
        closing = threading.Thread(target=pieces.close, args=(SECONDS,))
        closing.start()
        wait_until(lambda: pieces._writer._stopped)
        held.gate.set()
        closing.join(SECONDS)
        (ack,) = pieces.acks()
        assert not ack.ok and pieces.host.table.free_count == PAGES

    def test_a_write_that_is_put_back_while_the_engine_closes_is_acknowledged(
        self, pieces: CopyEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held, writer = Held(monkeypatch, "down"), pieces._writer
        put, stop, back = writer.put, writer.stop, threading.Event()

        def put_and_wait(*item: Any, again: bool = False) -> None:
            put(*item, again=again)
            if again:
                back.set()
                wait_until(lambda: writer._stopped)

        def stop_after_it(timeout: float) -> bool:
            held.gate.set()
            assert back.wait(SECONDS)
            return stop(timeout)

        monkeypatch.setattr(writer, "put", put_and_wait)
        monkeypatch.setattr(writer, "stop", stop_after_it)
        taken(pieces.write(np.arange(8)))
        assert held.begun.wait(SECONDS)
        assert pieces.close(SECONDS)
        (ack,) = pieces.acks()
        assert not ack.ok and (pieces.in_flight, pieces.host.table.free_count) == (0, PAGES)

    def test_urgent_loads_go_first(self, copies: CopyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        host = taken(copies.write(np.arange(6)))
        assert copies.wait_idle(SECONDS)
        copies.acks()
        held = Held(monkeypatch, "up")
        for page, priority in ((0, 0), (1, 5), (2, -5)):
            copies.load(host[page : page + 1], node=page, priority=priority)
            copies.start_loading()
            held.begun.wait(SECONDS)
        for page, priority in ((3, 9), (4, -9)):
            copies.load(host[page : page + 1], node=page, priority=priority)
        copies.start_loading()
        held.gate.set()
        assert copies.wait_idle(SECONDS)
        # A start is as urgent as the most urgent of its loads.
        assert [ack.node for ack in copies.acks()] == [0, 4, 3, 2, 1]

    def test_copies_whose_acks_nobody_takes_are_bounded(
        self, copies: CopyEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(copies_engine, "MAX_WAITING", 3)
        host = taken(copies.write(np.arange(2)))
        assert copies.wait_idle(SECONDS)
        copies.load(host, device_pages=as_pages([4, 5]))
        copies.load(host, device_pages=as_pages([6, 7]))
        with pytest.raises(TooManyRequests):
            copies.write([1])
        with pytest.raises(TooManyRequests):
            copies.load(host)
        assert copies.host.table.free_count == PAGES - 2
        copies.start_loading()
        assert copies.wait_idle(SECONDS) and len(copies.acks()) == 3
        taken(copies.write([1]))


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


class Held:
    """Copies of one direction wait for the gate; the device pages of each are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.device_pages: list[list[int]] = []
        copy = getattr(CopyPath, way)

        def held(path: CopyPath, layer: int, first: Pages, second: Pages) -> None:
            if layer == 0:
                self.device_pages.append((first if way == "down" else second).tolist())
                self.begun.set()
                assert self.gate.wait(SECONDS)
            copy(path, layer, first, second)

        monkeypatch.setattr(CopyPath, way, held)


class LaggingLane:
    """Its marks end when ``ended`` is set, or fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ended, self.waited = threading.Event(), threading.Event()
        self.fenced_by: list[int] = []
        self.waited_by: list[int] = []
        self._error = error

    def current(self) -> Any:
        return contextlib.nullcontext()

    def fence(self) -> LaggingLane:
        self.fenced_by.append(threading.get_ident())
        return self

    def mark(self) -> LaggingLane:
        return self

    def wait_here(self) -> None:
        self.waited_by.append(threading.get_ident())
        self.waited.set()
        assert self.ended.wait(SECONDS)
        if self._error is not None:
            raise self._error

    def wait_on_stream(self) -> None:
        """What comes later comes after it: nothing to do where all of it is done at once."""


def fails_at_layer(monkeypatch: pytest.MonkeyPatch, direction: Direction, which: int) -> None:
    way = "up" if direction is Direction.UP else "down"
    copy = getattr(CopyPath, way)

    def broken(path: CopyPath, layer: int, *pages: Pages) -> None:
        if layer == which:
            raise RuntimeError("the device fell off the bus")
        copy(path, layer, *pages)

    monkeypatch.setattr(CopyPath, way, broken)


def begin(copies: CopyEngine, direction: Direction, host: Pages) -> None:
    """A load of four pages, or a write of two."""
    if direction is Direction.UP:
        copies.load(host)
        copies.start_loading()
    else:
        copies.write([8, 9])
