"""The engine's aux buffers: a few hundred bytes a room (first token and the like) that travel with its last word."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvgrpc.arrays import rows_of
from kvgrpc.errors import InvalidRequest
from kvgrpc.fields import Count


@dataclass(frozen=True, slots=True)
class AuxBuffer:
    """One of the engine's aux buffers: ``items`` rows of ``item_bytes`` bytes from ``address`` on, in CPU memory."""

    address: Count
    item_bytes: Count
    items: Count

    @classmethod
    def from_arrays(cls, arrays: Sequence[Any]) -> tuple[AuxBuffer, ...]:
        """Buffers over the caller's arrays (numpy or torch, dense, in CPU memory): one row a room along the first axis.

        The caller keeps the arrays alive. Raises InvalidRequest.
        """
        found = []
        for number, array in enumerate(arrays):
            rows = rows_of(array, f"arrays[{number}]")
            if rows.stride_bytes != rows.row_bytes or not rows.location.startswith("cpu"):
                rule = "rows without gaps, in CPU memory"
                raise InvalidRequest.of(f"arrays[{number}]", f"{rows.stride_bytes} bytes on {rows.location}", rule)
            found.append(cls(rows.address, rows.row_bytes, rows.rows))
        return tuple(found)


class AuxRows:
    """Row ``index`` of all buffers as one string of ``row_bytes`` bytes. Threads may use different rows at once."""

    def __init__(self, buffers: Sequence[AuxBuffer]) -> None:
        self._rows = min((buffer.items for buffer in buffers), default=0)
        self._views = [(_view(buffer), buffer.item_bytes) for buffer in buffers]
        self.row_bytes = sum(buffer.item_bytes for buffer in buffers)

    def check(self, index: int | None) -> None:
        """Raises InvalidRequest for a row that does not exist, and for None where the engine has aux buffers."""
        rows = self._rows
        there = not rows if index is None else type(index) is int and 0 <= index < rows
        if not there:
            buffers = len(self._views)
            rule = (
                f"0 to {rows - 1}, a row of the {buffers} aux buffers" if buffers else "none, there are no aux buffers"
            )
            raise InvalidRequest.of("aux_index", index, rule)

    def read(self, index: int | None) -> bytes:
        """A copy of the row of each buffer, in order; empty without aux buffers. Raises InvalidRequest."""
        self.check(index)
        if index is None:
            return b""
        return b"".join([view[index * size : (index + 1) * size] for view, size in self._views])

    def write(self, index: int, row: bytes) -> None:
        """Writes the row of each buffer in order; the last one comes last, because engines look there (14, aux)."""
        offset = 0
        for view, size in self._views:
            view[index * size : (index + 1) * size] = row[offset : offset + size]
            offset += size


def _view(buffer: AuxBuffer) -> memoryview:
    return memoryview((ctypes.c_char * (buffer.items * buffer.item_bytes)).from_address(buffer.address)).cast("B")
