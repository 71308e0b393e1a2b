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
from kvgrpc.prefetch.copies.streams import seen_by
from kvgrpc.prefetch.pools.device import DevicePool
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages

# One slice copy costs about as much as gathering so many rows.
_ROWS_OF_A_SLICE = 2
_Run = tuple[int, int, int, int]
# What kernels move at once: numbers of device pages and of host pages, and the host's as a slice if that is one copy.
_Batch = tuple[Tensor, Tensor, slice | None]
# Rows of one column, each a value of its own: numpy gathers and scatters them as memory.
_Items = npt.NDArray[np.void]
# Bytes that are gathered before they are scattered: they are still in a core's cache then.
_GATHERED_BYTES = 256 * 1024
# The same on a device: the most of its memory that a copy takes for itself.
_STAGED_BYTES = 32 * 1024 * 1024


class IoBackend(enum.Enum):
    """KERNEL: one kernel gathers the rows of a layer and one scatters them, in the host's memory too. DIRECT: runs of
    pages that are adjacent on both sides cross as they are, which is best where pages are; others as with KERNEL."""

    KERNEL = "kernel"
    DIRECT = "direct"


class CopyPath:
    """Both directions between two pools of one shape. Not thread-safe; every copy is asynchronous on CUDA.

    ``kernels``: rows are moved by kernels of the device, to which the host's memory is mapped (``streams.seen_by``);
    None: on CUDA. A CPU runs the same lines, but numpy moves more there.
    """

    def __init__(
        self,
        device: DevicePool,
        host: HostPool,
        backend: IoBackend = IoBackend.KERNEL,
        *,
        kernels: bool | None = None,
    ) -> None:
        if device.shape != host.shape:
            raise InvalidRequest.of("device_pool.shape", device.shape, f"the host pool's, {host.shape}")
        self._device = device
        self._host = host
        self._views = _views(host, [torch.from_numpy(host.block_memory(number)) for number in range(len(host.blocks))])
        self._components = [block.component.name for block in host.blocks]
        self._kernels = device.device.type == "cuda" if kernels is None else kernels
        # Else torch takes a slice of pages through memory of its own, and the caller waits for it.
        self._slices = not self._kernels or all(view.is_contiguous() for view in self._views.values())
        self._direct = backend is IoBackend.DIRECT and self._slices
        self._last: tuple[Pages, Pages, list[_Run], list[_Batch]] | None = None
        # On a CPU, of each layer and component: the columns of the host's rows beside those of the device's.
        self._columns: dict[tuple[int, str], list[tuple[_Items, _Items]]] = {}
        # With kernels, of each layer and component: the host's rows beside the device's.
        self._words: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        if self._kernels:
            seen = [seen_by(device.device, host.block_memory(number)) for number in range(len(host.blocks))]
            self._words = {name: _words(view, device.rows(*name)) for name, view in _views(host, seen).items()}

    @property
    def layers(self) -> int:
        return self._host.shape.layers

    def down(self, layer: int, device_pages: Pages, host_pages: Pages) -> None:
        """One layer of the pages, from device to host."""
        runs, batches = self._plan(device_pages, host_pages)
        for component in self._components:
            rows, view = self._device.rows(layer, component), self._views[layer, component]
            for _, device_first, host_first, count in runs:
                _copy(view[host_first : host_first + count], rows[device_first : device_first + count])
            for device_index, host_index, host_run in batches:
                ours, theirs = self._words[layer, component]
                gathered = theirs.index_select(0, device_index)
                if host_run is None:
                    ours.index_copy_(0, host_index, gathered)
                else:
                    _copy(view[host_run], gathered.view(torch.uint8))
            if not runs and not self._kernels:
                for to, source in self._columns_of(layer, component):
                    _scatter(to, host_pages, source, device_pages)

    def up(self, layer: int, host_pages: Pages, device_pages: Pages) -> None:
        """One layer of the pages, from host to device."""
        runs, batches = self._plan(device_pages, host_pages)
        for component in self._components:
            rows, view = self._device.rows(layer, component), self._views[layer, component]
            for _, device_first, host_first, count in runs:
                _copy(rows[device_first : device_first + count], view[host_first : host_first + count])
            for device_index, host_index, host_run in batches:
                ours, theirs = self._words[layer, component]
                if host_run is None:
                    gathered = ours.index_select(0, host_index)
                else:
                    gathered = view[host_run].to(rows.device, non_blocking=True).view(theirs.dtype)
                theirs.index_copy_(0, device_index, gathered)
            if not runs and not self._kernels:
                for source, to in self._columns_of(layer, component):
                    _scatter(to, device_pages, source, host_pages)

    def _plan(self, device_pages: Pages, host_pages: Pages) -> tuple[list[_Run], list[_Batch]]:
        """Runs that are worth a slice copy each, if enough pages are adjacent; else what kernels move, if there are
        such. Found once for all layers of a copy, which gives the same arrays for each."""
        known = self._last
        if known is None or known[0] is not device_pages or known[1] is not host_pages:
            runs = list(_runs(device_pages, host_pages)) if self._direct else []
            if not _few(runs, len(host_pages)):
                runs = []
            batches = self._batches(device_pages, host_pages) if self._kernels and not runs else []
            known = self._last = (device_pages, host_pages, runs, batches)
        return known[2], known[3]

    def _batches(self, device_pages: Pages, host_pages: Pages) -> list[_Batch]:
        device_index, host_index = (
            torch.from_numpy(pages).to(self._device.device, non_blocking=True) for pages in (device_pages, host_pages)
        )
        largest = max(component.layer_bytes for component in self._host.shape.components)
        at_once = max(1, _STAGED_BYTES // largest)
        parts = [slice(start, start + at_once) for start in range(0, len(host_pages), at_once)]
        return [
            (device_index[part], host_index[part], _adjacent(host_pages[part]) if self._slices else None)
            for part in parts
        ]

    def _columns_of(self, layer: int, component: str) -> list[tuple[_Items, _Items]]:
        """The same bytes of each page at the host and the device: one column, or as many as a page has rows there."""
        known = self._columns.get((layer, component))
        if known is None:
            host, device = _alike(self._views[layer, component], self._device.rows(layer, component))
            known = list(zip(_columns(host), _columns(device), strict=True))
            self._columns[layer, component] = known
        return known


def _views(host: HostPool, memory: list[Tensor]) -> dict[tuple[int, str], Tensor]:
    """Live bytes of each layer and component: uint8 ``[pages, row_bytes]`` or ``[pages, rows, row_bytes]``."""
    views = {}
    for block, seen in zip(host.blocks, memory, strict=True):
        rows, apart = ((), ()) if block.rows == 1 else ((block.rows,), (block.row_stride,))
        shape, strides = (host.pages, *rows, block.row_bytes), (block.page_stride, *apart, 1)
        for layer in range(host.shape.layers):
            offset = seen.storage_offset() + layer * block.layer_stride
            views[layer, block.component.name] = torch.as_strided(seen, shape, strides, offset)
    return views


def _copy(destination: Tensor, source: Tensor) -> None:
    destination, source = _alike(destination, source)
    destination.copy_(source, non_blocking=True)


def _words(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both in words of eight bytes, of which each thread of a kernel moves one, if they divide into such."""
    one, other = _alike(one, other)
    both = [(rows.shape[-1], rows.data_ptr(), rows.storage_offset(), *rows.stride()[:-1]) for rows in (one, other)]
    if any(number % 8 for numbers in both for number in numbers):
        return one, other
    return one.view(torch.int64), other.view(torch.int64)


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
