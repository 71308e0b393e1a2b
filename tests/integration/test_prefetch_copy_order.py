"""Copies between device and host take turns: large ones in pieces, urgent ones first, at most so many."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvgrpc.errors import TooManyRequests
from kvgrpc.prefetch.copies import engine as copies_engine
from kvgrpc.prefetch.copies.copy_operation import CopyOperation, Direction, merge
from kvgrpc.prefetch.copies.engine import CopyEngine
from kvgrpc.prefetch.copies.paths import CopyPath, IoBackend
from kvgrpc.prefetch.pools.pages import Pages, PageState, as_pages
from kvgrpc.prefetch.pools.shape import HostLayout
from tests.support.copying import (
    LAYERS,
    PAGES,
    SECONDS,
    Held,
    engine,
    fill,
    shape_of,
    taken,
)
from tests.support.waiting import wait_until


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
        assert {pieces.host.table.state(page) for page in good} == {PageState.PRESENT}
        assert pieces.host.table.counts()["present"] == 3

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
