"""Reads a backend's config mapping into its typed form, or says which key is wrong and what would be right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from kvgrpc.errors import InvalidRequest

C = TypeVar("C", bound=msgspec.Struct)
Nbytes = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
Threads = Annotated[int, msgspec.Meta(ge=1, le=64)]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def read_settings(kind: type[C], mapping: Mapping[str, object]) -> C:
    """``mapping`` as ``kind``; keys that end in ``_bytes`` also take "64MB" (of 1,024). Raises InvalidRequest."""
    for key in mapping:
        if key not in kind.__struct_fields__:
            raise InvalidRequest.of("storage_config", key, f"one of the keys {', '.join(kind.__struct_fields__)}")
    found = {key: _size(key, value) if key.endswith("_bytes") else value for key, value in mapping.items()}
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        key = str(error).rpartition("$.")[2].rstrip("`")
        wrong = key if key in mapping else "storage_config"
        raise InvalidRequest.of(
            wrong, mapping.get(key, "not given"), f"as docs/storage.md says ({str(error).partition(' - at')[0]})"
        ) from None


def _size(key: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    if (found := _SIZE.fullmatch(value)) is None:
        raise InvalidRequest.of(key, value, 'a number of bytes, or text as "64MB" or "1.5 GiB"')
    return int(float(found[1]) * _FACTORS[found[2].lower()])
