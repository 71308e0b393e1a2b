"""Moves the bytes of pages between a device pool and a host pool, a layer at a time, on whatever stream is current."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvgrpc.errors import InvalidRequest
from kvgrpc.prefetch.pools.device import DevicePool
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages

# One slice copy costs about as much as gathering so many rows.
_ROWS_OF_A_SLICE = 2
_Run = tuple[int, int, int, int]
# Rows of one column, each a value of its own: numpy gathers and scatters them as memory.
_Items = npt.NDArray[np.void]
# Bytes that are gathered before they are scattered: they are still in a core's cache then.
_GATHERED_BYTES = 256 * 1024


class IoBackend(enum.Enum):
    """KERNEL: rows are gathered and scattered on the device, and cross in runs of host pages. DIRECT: runs of pages
    that are adjacent on both sides cross as they are, which is best where pages are."""

    KERNEL = "kernel"
    DIRECT = "direct"


class CopyPath:
    """Both directions between two pools of one shape. Not thread-safe; every copy is asynchronous on CUDA."""

    def __init__(self, device: DevicePool, host: HostPool, backend: IoBackend = IoBackend.KERNEL) -> None:
        if device.shape != host.shape:
            raise InvalidRequest.of("device_pool.shape", device.shape, f"the host pool's, {host.shape}")
        self._device = device
        self._host = host
        self._direct = backend is IoBackend.DIRECT
        self._views = {
            (layer, block.component.name): _view(host, number, layer)
            for number, block in enumerate(host.blocks)
            for layer in range(host.shape.layers)
        }
        self._components = [block.component.name for block in host.blocks]
        self._cuda = device.device.type == "cuda"
        self._last_runs: tuple[Pages, Pages, list[_Run]] | None = None
        # On a CPU, of each layer and component: the columns of the host's rows beside those of the device's.
        self._columns: dict[tuple[int, str], list[tuple[_Items, _Items]]] = {}

    @property
    def layers(self) -> int:
        return self._host.shape.layers

    def down(self, layer: int, device_pages: Pages, host_pages: Pages) -> None:
        """One layer of the pages, from device to host."""
        for component in self._components:
            rows, view = self._device.rows(layer, component), self._views[layer, component]
            if runs := self._runs_of(device_pages, host_pages):
                for _, device_first, host_first, count in runs:
                    _copy(view[host_first : host_first + count], rows[device_first : device_first + count])
            elif self._cuda:
                gathered = rows.index_select(0, self._index(device_pages))
                for start, _, host_first, count in _runs(None, host_pages):
                    _copy(view[host_first : host_first + count], gathered[start : start + count])
            else:
                for ours, theirs in self._columns_of(layer, component):
                    _scatter(ours, host_pages, theirs, device_pages)

    def up(self, layer: int, host_pages: Pages, device_pages: Pages) -> None:
        """One layer of the pages, from host to device."""
        for component in self._components:
            rows, view = self._device.rows(layer, component), self._views[layer, component]
            if runs := self._runs_of(device_pages, host_pages):
                for _, device_first, host_first, count in runs:
                    _copy(rows[device_first : device_first + count], view[host_first : host_first + count])
            elif self._cuda:
                staged = torch.empty((len(host_pages), rows.shape[1]), dtype=torch.uint8, device=rows.device)
                for start, _, host_first, count in _runs(None, host_pages):
                    _copy(staged[start : start + count], view[host_first : host_first + count])
                rows.index_copy_(0, self._index(device_pages), staged)
            else:
                for ours, theirs in self._columns_of(layer, component):
                    _scatter(theirs, device_pages, ours, host_pages)

    def _runs_of(self, device_pages: Pages, host_pages: Pages) -> list[_Run]:
        """Runs that are worth a slice copy each; empty: too few pages are adjacent. Found once for all layers of a
        copy, which gives the same arrays for each."""
        if not self._direct:
            return []
        known = self._last_runs
        if known is None or known[0] is not device_pages or known[1] is not host_pages:
            runs = list(_runs(device_pages, host_pages))
            known = self._last_runs = (device_pages, host_pages, runs if _few(runs, len(host_pages)) else [])
        return known[2]

    def _columns_of(self, layer: int, component: str) -> list[tuple[_Items, _Items]]:
        """The same bytes of each page at the host and the device: one column, or as many as a page has rows there."""
        known = self._columns.get((layer, component))
        if known is None:
            host, device = _alike(self._views[layer, component], self._device.rows(layer, component))
            known = list(zip(_columns(host), _columns(device), strict=True))
            self._columns[layer, component] = known
        return known

    def _index(self, pages: Pages) -> Tensor:
        return torch.from_numpy(pages).to(self._device.device, non_blocking=True)


def _view(host: HostPool, number: int, layer: int) -> Tensor:
    """Live bytes of one component and layer: uint8 ``[pages, row_bytes]`` or ``[pages, rows, row_bytes]``."""
    block = host.blocks[number]
    memory = torch.from_numpy(host.block_memory(number))
    if block.rows == 1:
        size, stride = (host.pages, block.row_bytes), (block.page_stride, 1)
        return torch.as_strided(memory, size, stride, memory.storage_offset() + layer * block.layer_stride)
    shape = (host.pages, block.rows, block.row_bytes)
    strides = (block.page_stride, block.row_stride, 1)
    return torch.as_strided(memory, shape, strides, memory.storage_offset() + layer * block.layer_stride)


def _copy(destination: Tensor, source: Tensor) -> None:
    destination, source = _alike(destination, source)
    destination.copy_(source, non_blocking=True)


def _columns(rows: Tensor) -> list[_Items]:
    """Of memory on a CPU, ``[pages, row_bytes]`` or ``[pages, rows, row_bytes]``."""
    of_pages = rows.numpy().reshape(len(rows), -1, rows.shape[-1]) if rows.dim() == 2 else rows.numpy()
    row = np.dtype((np.void, rows.shape[-1]))
    return [of_pages[:, number].view(row)[:, 0] for number in range(of_pages.shape[1])]


def _scatter(to: _Items, to_pages: Pages, source: _Items, source_pages: Pages) -> None:
    """One call for many rows: a call of torch for each took fifty times as long as the bytes of a page of one token.
    Where the pages of one side are adjacent, as those of a host pool often are, rows are copied once and not twice.
    """
    to_run, source_run = _adjacent(to_pages), _adjacent(source_pages)
    if source_run is not None:
        to[to_pages if to_run is None else to_run] = source[source_run]
        return
    if to_run is not None and to.flags.c_contiguous and source.flags.c_contiguous:
        # Every other mode copies once more; no number is clipped, as the pools have checked them all.
        source.take(source_pages, out=to[to_run], mode="clip")
        return
    at_once = max(1, _GATHERED_BYTES // max(1, source.itemsize))
    for start in range(0, len(to_pages), at_once):
        some = slice(start, start + at_once)
        rows = source[source_pages[some]]
        if to_run is None:
            to[to_pages[some]] = rows
        else:
            to[to_run][some] = rows


def _adjacent(pages: Pages) -> slice | None:
    """The pages as a slice, if each is followed by its neighbour."""
    if not len(pages) or (len(pages) > 1 and (np.diff(pages) != 1).any()):
        return None
    return slice(int(pages[0]), int(pages[-1]) + 1)


def _alike(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Of a page that is one row here and several there, the one is seen as the several; it is contiguous."""
    if one.dim() < other.dim():
        return one.view(one.shape[0], *other.shape[1:]), other
    if other.dim() < one.dim():
        return one, other.view(other.shape[0], *one.shape[1:])
    return one, other


def _few(runs: list[_Run], pages: int) -> bool:
    return len(runs) * _ROWS_OF_A_SLICE <= pages or pages <= _ROWS_OF_A_SLICE


def _runs(first: Pages | None, second: Pages) -> Iterator[_Run]:
    """(position, page of the first, page of the second, pages) of what is adjacent in both."""
    if not len(second):
        return
    breaks = np.diff(second) != 1
    if first is not None:
        breaks |= np.diff(first) != 1
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(second)]
    for start, end in itertools.pairwise(starts):
        yield start, 0 if first is None else int(first[start]), int(second[start]), end - start
