"""The memory of a pool read by the order of its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def tokens_of(
    arrays: Mapping[Any, npt.NDArray[np.int32]], axes: Sequence[str], layer: int, part: int
) -> npt.NDArray[np.int32]:
    """Keys (``part`` 0) or values of a layer as (page, token, head, dim), of this very memory."""
    if "kv" in axes:
        whole = np.moveaxis(arrays[layer, "kv"], 1 + list(axes).index("kv"), 0)[part]
        rest = [axis for axis in axes if axis != "kv"]
    else:
        whole, rest = arrays[layer, "kv"[part]], list(axes)
    return np.transpose(whole, [0, *(1 + rest.index(axis) for axis in ("token", "head", "dim"))])
