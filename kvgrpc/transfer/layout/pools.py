"""Page numbers as engines hand them over: int32 arrays, lists or CPU tensors, copied before the call returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvgrpc.errors import InvalidRequest
from kvgrpc.transfer.protocol.destination import Destination
from kvgrpc.transfer.protocol.types import U32Array


def as_pages(pages: npt.ArrayLike) -> U32Array:
    """Page numbers as a uint32[n] copy. Raises InvalidRequest for what is no page number, and no other exception."""
    if type(pages) is np.ndarray and pages.dtype == np.int32 and pages.ndim == 1:
        return pages.astype(np.uint32)  # a negative page is above every pool: check_pages names it
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


def pages_of_pools(
    pages: npt.ArrayLike | Mapping[str, npt.ArrayLike], names: Sequence[str]
) -> tuple[U32Array, tuple[U32Array, ...] | None]:
    """Pages of the first pool, and of the others where ``pages`` says them by the pools' names; None: all have the
    same. A pool that is not named has none. Raises as ``as_pages``, and for names of no pool.
    """
    if type(pages) is np.ndarray or not isinstance(pages, Mapping):
        return as_pages(pages), None
    unknown = [name for name in pages if name not in names]
    if unknown:
        raise InvalidRequest.of("pages", unknown[0], f"names of pools: {', '.join(names)}")
    first, *others = [as_pages(pages[name]) if name in pages else _NO_PAGES for name in names]
    return first, tuple(others) if others else None


def check_distinct(pages: Destination, field: str = "pages") -> None:
    """Raises InvalidRequest for a page that occurs twice: the second page of the prompt would overwrite the first."""
    twice = pages.twice()
    if twice is not None:
        raise InvalidRequest.of(field, twice, "page numbers that are there once")


_NO_PAGES = np.empty(0, dtype=np.uint32)


def _not_pages(what: str) -> InvalidRequest:
    return InvalidRequest.of("pages", what, "page numbers, one dimension of integers from 0 to 2^32-1")
