"""A small engine that copies pages between device and host, and what makes its copies wait, lag or fail."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvgrpc.prefetch.copies.copy_operation import Direction
from kvgrpc.prefetch.copies.engine import CopyEngine
from kvgrpc.prefetch.copies.paths import CopyPath, IoBackend
from kvgrpc.prefetch.model import NotEnoughPages
from kvgrpc.prefetch.pools.device import DevicePool
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages
from kvgrpc.prefetch.pools.shape import Component, HostLayout, PageShape

PAGES, LAYERS = 16, 3
SECONDS = 20.0


def shape_of(kind: str, dtype: str) -> PageShape:
    if kind == "mha":
        return PageShape.mha(LAYERS, 4, 2, 8, dtype)
    if kind == "state":
        sizes = {"k": 64, "v": 64, "latent": 48, "indexer": 12, "state": 7}
        return PageShape(LAYERS, 4, tuple(Component(*each) for each in sizes.items()), dtype)
    return PageShape.mla(LAYERS, 4, 20, dtype, indexer_bytes=3)


@pytest.fixture
def copies() -> Iterator[CopyEngine]:
    made = engine(shape_of("mha", "float16"), HostLayout.PAGE_FIRST_DIRECT, IoBackend.KERNEL)
    yield made
    made.close(SECONDS)


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
