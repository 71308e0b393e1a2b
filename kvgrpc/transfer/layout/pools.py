"""Page numbers as engines hand them over: int32 arrays, lists or CPU tensors, copied before the call returns.

``copy_of`` does on an engine's thread what must be done there, and ``destination_of`` the rest: what an engine has not
called lately runs ten times slower, and numpy's conversion then takes 15 us.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvgrpc.errors import InvalidRequest
from kvgrpc.transfer.protocol.destination import Destination
from kvgrpc.transfer.protocol.types import U32Array

# Of each pool, or of one for all: page numbers of four bytes, little-endian, or uint32[n].
CopiedPages: TypeAlias = "tuple[bytes | U32Array, ...]"


def copy_of(pages: npt.ArrayLike | Mapping[str, npt.ArrayLike], names: Sequence[str]) -> CopiedPages:
    """Of the pool, or of each where ``pages`` says them by the pools' names. A pool that is not named has none.

    Raises InvalidRequest for what are no page numbers, and for names of no pool.
    """
    if type(pages) is np.ndarray or not isinstance(pages, Mapping):
        return (_copy(pages),)
    unknown = [name for name in pages if name not in names]
    if unknown:
        raise InvalidRequest.of("pages", unknown[0], f"names of pools: {', '.join(names)}")
    return tuple([_copy(pages[name]) if name in pages else _NO_PAGES for name in names])


def count_of(copied: CopiedPages) -> int:
    """Returns how many pages of the first pool."""
    first = copied[0]
    return len(first) // _INT32.itemsize if type(first) is bytes else len(first)


def pages_of_pools(copied: CopiedPages) -> tuple[U32Array, tuple[U32Array, ...] | None]:
    """Of the first pool, and of the others; None: all have the same. A negative page is above every pool here, and
    whoever compares it with the pool's pages names it."""
    return _numbers(copied[0]), tuple(map(_numbers, copied[1:])) if len(copied) > 1 else None


def destination_of(copied: CopiedPages, first_page: int) -> Destination:
    """The destination of each pool's pages, as decode wants them."""
    return Destination(copied[0], first_page, tuple(map(Destination, copied[1:])) if len(copied) > 1 else None)


def as_pages(pages: npt.ArrayLike) -> U32Array:
    """Page numbers as a uint32[n] copy. Raises InvalidRequest for what is no page number, and no other exception."""
    try:
        numbers = np.asarray(pages)
        if numbers.size == 0:
            return _NO_PAGES
        if numbers.ndim == 1 and numbers.dtype.kind in "iu":
            if numbers.dtype.kind == "i" and int(numbers.min()) < 0:
                raise _not_pages(f"page {int(numbers.min())} is negative")
            if numbers.dtype.itemsize > 4 and int(numbers.max()) >= 2**32:
                raise _not_pages(f"page {int(numbers.max())} is above 2^32-1")
            return numbers.astype(np.uint32)
        raise _not_pages(f"shape {numbers.shape}, dtype {numbers.dtype}")
    except InvalidRequest:
        raise
    except Exception as error:  # foreign objects may raise anything in __array__
        raise _not_pages(f"{type(error).__name__}: {error}") from error


def _copy(pages: npt.ArrayLike) -> bytes | U32Array:
    if type(pages) is np.ndarray and pages.dtype is _INT32 and pages.ndim == 1:
        return pages.tobytes()
    return as_pages(pages)


def _numbers(copied: bytes | U32Array) -> U32Array:
    return np.frombuffer(copied, _UINT32) if isinstance(copied, bytes) else copied


_UINT32 = np.dtype("<u4")
_INT32 = np.dtype("<i4")
_NO_PAGES = np.empty(0, dtype=np.uint32)


def _not_pages(what: str) -> InvalidRequest:
    return InvalidRequest.of("pages", what, "page numbers, one dimension of integers from 0 to 2^32-1")
