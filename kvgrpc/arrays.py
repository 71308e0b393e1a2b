"""Finds the memory of an array: numpy's, torch's, and whatever has the same few words. Loads neither of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvgrpc.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Rows:
    """An array as equal rows along its first axis. Sizes are bytes; ``location`` as in Pool."""

    address: int
    rows: int
    row_bytes: int
    stride_bytes: int
    dtype: str
    location: str


def rows_of(array: Any, field: str) -> Rows:
    """Reads numpy arrays (``__array_interface__``) and torch tensors (``data_ptr``), on a host or a device.

    Each row must be dense; rows may be apart. Raises InvalidRequest naming ``field``.
    """
    if hasattr(array, "data_ptr"):
        size, steps = int(array.element_size()), array.stride()
        address, strides = int(array.data_ptr()), tuple(int(step) * size for step in steps)
        dtype, location = str(array.dtype).removeprefix("torch."), _location(str(array.device))
    elif hasattr(array, "__array_interface__"):
        interface = array.__array_interface__
        size, (address, read_only) = int(array.dtype.itemsize), interface["data"]
        if read_only:
            raise InvalidRequest.of(field, "read-only", "memory that can be written")
        strides, dtype, location = tuple(int(step) for step in array.strides), str(array.dtype), "cpu:0"
    else:
        raise InvalidRequest.of(field, type(array).__name__, "a numpy array or a torch tensor")
    shape = tuple(int(length) for length in array.shape)
    if not shape or not all(shape):
        raise InvalidRequest.of(field, shape, "a shape with at least one row, and nothing empty")
    if strides[1:] != _dense(shape[1:], size):
        raise InvalidRequest.of(field, f"strides {strides} of shape {shape}", "dense behind the first axis")
    row_bytes = math.prod(shape[1:]) * size
    stride = strides[0] if shape[0] > 1 else row_bytes
    if stride < row_bytes:
        raise InvalidRequest.of(field, f"strides {strides}", "rows that do not overlap")
    return Rows(address, shape[0], row_bytes, stride, dtype, location)


def _dense(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(size * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _location(device: str) -> str:
    return device if ":" in device else f"{device}:0"
