"""Copies by kernels of the device, as on CUDA: a CPU runs the same lines here, and numpy's way says what is right."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvgrpc.errors import CopyFailed
from kvgrpc.prefetch.copies import engine as copies_engine
from kvgrpc.prefetch.copies import paths, streams
from kvgrpc.prefetch.copies.copy_operation import Direction
from kvgrpc.prefetch.copies.paths import CopyPath, IoBackend
from kvgrpc.prefetch.copies.streams import seen_by
from kvgrpc.prefetch.pools.device import DevicePool
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages, as_pages
from kvgrpc.prefetch.pools.shape import HostLayout
from tests.support.copying import LAYERS, PAGES, SECONDS, begin, engine, fill, shape_of, taken

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
KINDS = [("mha", "bfloat16"), ("mla", "float8_e4m3fn"), ("state", "float16")]
# Pages of one batch: less than all, one, all.
AT_ONCE = (3, 1, PAGES)


def page_lists(seed: int) -> list[tuple[Pages, Pages]]:
    """(device pages, host pages): scattered, adjacent, and runs between single pages, of any length, none as well."""
    rng = np.random.default_rng(seed)
    lists = [(as_pages([]), as_pages([])), (as_pages([3]), as_pages([9])), (np.arange(PAGES), np.arange(PAGES))]
    for count in rng.integers(2, PAGES, size=6):
        scattered = rng.permutation(PAGES)[:count]
        first = int(rng.integers(0, PAGES - count + 1))
        runs = np.sort(rng.permutation(PAGES)[:count])
        lists += [(rng.permutation(PAGES)[:count], host) for host in (scattered, np.arange(first, first + count), runs)]
    return lists


def content(host: HostPool) -> list[bytes]:
    return [host.block_memory(number).tobytes() for number in range(len(host.blocks))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize("backend", IoBackend)
@pytest.mark.parametrize("layout", HostLayout)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_every_byte_goes_where_numpy_puts_it(
    kind: str,
    dtype: str,
    layout: HostLayout,
    backend: IoBackend,
    at_once: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = shape_of(kind, dtype)
    monkeypatch.setattr(paths, "_STAGED_BYTES", at_once * max(each.layer_bytes for each in shape.components))
    ours, theirs = DevicePool.allocate(shape, PAGES, device), DevicePool.allocate(shape, PAGES)
    host, expected = HostPool(shape, PAGES, layout), HostPool(shape, PAGES, layout)
    pinned = streams.pin(host, ours.device)
    path, other = CopyPath(ours, host, backend, kernels=True), CopyPath(theirs, expected, backend)
    for device_pages, host_pages in page_lists(seed=at_once):
        fill(theirs, np.arange(PAGES))
        for layer in range(LAYERS):
            for component in shape.components:
                ours.rows(layer, component.name).copy_(theirs.rows(layer, component.name))
            path.down(layer, device_pages, host_pages)
            other.down(layer, device_pages, host_pages)
        streams.open_lane(ours.device).fence().wait_here()
        assert content(host) == content(expected)
        target = np.roll(device_pages, 1)
        for layer in range(LAYERS):
            path.up(layer, host_pages, target)
            other.up(layer, host_pages, target)
            for component in shape.components:
                rows = ours.rows(layer, component.name).cpu()
                assert torch.equal(rows, theirs.rows(layer, component.name))
    if pinned:
        streams.unpin(host)


class Calls(TorchFunctionMode):
    """Counts what torch is asked to do, but for looks at attributes and views."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in ("__get__", "__getitem__", "view", "dim"):
            self.made[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls_of_a_layer(
    layout: HostLayout, device_pages: Pages, host_pages: Pages, backend: IoBackend = IoBackend.KERNEL
) -> list[Counter[str]]:
    """Down and up, of two components, after a layer whose numbers of pages went to the device."""
    shape = shape_of("mha", "bfloat16")
    path = CopyPath(DevicePool.allocate(shape, PAGES), HostPool(shape, PAGES, layout), backend, kernels=True)
    path.down(0, device_pages, host_pages)
    with Calls() as down:
        path.down(1, device_pages, host_pages)
    with Calls() as up:
        path.up(1, host_pages, device_pages)
    return [down.made, up.made]


@pytest.mark.parametrize("layout", HostLayout)
@pytest.mark.parametrize("count", [2, 5, PAGES])
def test_a_layer_of_scattered_pages_is_one_gather_and_one_scatter_of_each_component(
    layout: HostLayout, count: int
) -> None:
    made = calls_of_a_layer(layout, np.arange(count), np.arange(PAGES)[::-1][:count].copy())
    assert made == [{"index_select": 2, "index_copy_": 2}] * 2


@pytest.mark.parametrize("count", [2, 5, PAGES])
def test_adjacent_host_pages_whose_layer_is_one_piece_cross_as_that_piece(count: int) -> None:
    made = calls_of_a_layer(HostLayout.LAYER_FIRST, np.arange(PAGES)[::-1][:count].copy(), np.arange(count))
    assert made == [{"index_select": 2, "copy_": 2}, {"to": 2, "index_copy_": 2}]


@pytest.mark.parametrize("backend", IoBackend)
@pytest.mark.parametrize("layout", [HostLayout.PAGE_FIRST, HostLayout.PAGE_FIRST_DIRECT])
def test_adjacent_host_pages_whose_layer_is_in_pieces_are_no_slices(layout: HostLayout, backend: IoBackend) -> None:
    made = calls_of_a_layer(layout, np.arange(5), np.arange(5), backend)
    assert made == [{"index_select": 2, "index_copy_": 2}] * 2, "torch would stage them on the host"


def test_a_layer_of_more_than_is_staged_at_once_goes_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_STAGED_BYTES", 5 * shape_of("mha", "bfloat16").components[0].layer_bytes)
    made = calls_of_a_layer(HostLayout.PAGE_FIRST_DIRECT, np.arange(PAGES), np.arange(PAGES)[::-1].copy())
    assert made == [{"index_select": 2 * 4, "index_copy_": 2 * 4}] * 2, "16 pages, 5 at a time"


@pytest.mark.parametrize("direction", Direction)
def test_pages_are_not_there_when_a_scatter_fails_half_way(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of("mha", "float16")
    monkeypatch.setattr(paths, "_STAGED_BYTES", shape.components[0].layer_bytes)
    monkeypatch.setattr(copies_engine, "CopyPath", partial(CopyPath, kernels=True))
    copies = engine(shape, HostLayout.PAGE_FIRST_DIRECT, IoBackend.KERNEL)
    host = taken(copies.write(np.arange(4)))
    assert copies.wait_idle(SECONDS)
    assert [ack.ok for ack in copies.acks()] == [True]
    made = 0

    def broken(rows: torch.Tensor, *arguments: Any) -> torch.Tensor:
        nonlocal made
        made += 1
        if made % 4 == 0:
            raise RuntimeError("the device fell off the bus")
        return index_copy(rows, *arguments)

    index_copy = torch.Tensor.index_copy_
    monkeypatch.setattr(torch.Tensor, "index_copy_", broken)
    begin(copies, direction, host)
    assert copies.wait_idle(SECONDS)
    (ack,) = copies.acks()
    assert not ack.ok and ack.failure is not None and "fell off the bus" in ack.failure.message and made == 4
    assert copies.host.table.counts()["present"] == 4, "those of the write before"
    assert copies.host.table.free_count == PAGES - 4 and copies.device.table.free_count == PAGES
    assert copies.close(SECONDS)


def test_a_device_that_sees_a_copy_of_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostPool(shape_of("mha", "float16"), PAGES).block_memory(0)

    def as_tensor(data: Any, *, device: torch.device) -> torch.Tensor:
        told = data.__cuda_array_interface__
        assert told["data"] == (memory.ctypes.data, False) and told["shape"] == memory.shape
        return torch.from_numpy(memory).clone() if copied else torch.from_numpy(memory)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    copied = False
    assert seen_by(torch.device("cuda"), memory).data_ptr() == memory.ctypes.data
    copied = True
    with pytest.raises(CopyFailed, match="a copy of the host pool"):
        seen_by(torch.device("cuda"), memory)
