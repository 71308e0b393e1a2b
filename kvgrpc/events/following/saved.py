"""The knowledge of an index as bytes of a file, so that one that starts again need not read 64 snapshots first. Pure.

A line of JSON (what each cache is, its log, position and digest), then the hashes as arrays of 8 little-endian bytes,
then a CRC-32 of all before it. Nothing of it is believed unchecked: bytes by the CRC, each cache by its digest, and the
log by the publisher, who refuses a log that is not its own.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvgrpc.events.following.groups import CacheGroup
from kvgrpc.events.log.digest import StateDigest, TierDigest

_MAGIC = "kvgrpc index 1"
_CRC_BYTES = 4
# Engines have a few copies of a block, not thousands.
_MOST_COPIES = 2**20
# Taken out of a dictionary at once: a step of about 3 ms that no other thread interrupts.
_KEYS_AT_ONCE = 65_536
_Hashes = NDArray[np.uint64]


class SavedPlace(NamedTuple):
    """Blocks of one medium and group; ``copies`` of those with more than one copy."""

    medium: str
    group: int
    hashes: Sequence[int] | _Hashes
    copies: dict[int, int]


@dataclass(frozen=True, slots=True)
class SavedCache:
    """One cache at one position of its log. ``media``: where each medium of it stands in the sets of holders."""

    engine: str
    dp: int
    log_id: str
    digest: StateDigest
    page_tokens: int
    groups: dict[int, CacheGroup] = field(default_factory=dict)
    places: list[SavedPlace] = field(default_factory=list)
    slot: int = 0
    media: dict[str, tuple[int, dict[int, int]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedCut:
    """An index at one moment: its caches, and the blocks of group 0 with the numbers of their sets of holders."""

    caches: list[SavedCache]
    numbers: Mapping[int, int]
    holders: Sequence[tuple[int, ...]]


def pack(cut: SavedCut) -> Iterator[bytes]:
    """The parts of the file. For a thread: it takes seconds for millions of blocks."""
    hashes, ends = _by_set(cut.numbers)
    members = _members(cut)
    arrays: list[_Hashes] = []
    about = []
    for cache in cut.caches:
        places: list[dict[str, Any]] = []
        for medium, (plane, copies) in cache.media.items():
            parts = [hashes[slice(*ends[number])] for number in members.get((cache.slot, plane), ()) if number in ends]
            _put(places, arrays, medium, 0, np.concatenate(parts) if parts else np.array([], np.uint64), copies)
        for place in cache.places:
            _put(places, arrays, place.medium, place.group, np.array(place.hashes, np.uint64), place.copies)
        about.append(_about(cache) | {"places": places})
    head = json.dumps({"magic": _MAGIC, "caches": about}).encode() + b"\n"
    crc = zlib.crc32(head)
    yield head
    for array in arrays:
        part = array.astype("<u8").tobytes()
        crc = zlib.crc32(part, crc)
        yield part
    yield crc.to_bytes(_CRC_BYTES, "little")


def unpack(data: bytes) -> dict[tuple[str, int], SavedCache]:
    """The caches. Raises ValueError for what is no such file, or was cut off."""
    body = memoryview(data)[:-_CRC_BYTES]
    if zlib.crc32(body) != int.from_bytes(data[-_CRC_BYTES:], "little") or len(data) <= _CRC_BYTES:
        raise ValueError("its checksum is wrong")
    head, _, _ = data.partition(b"\n")
    told = json.loads(head)
    if told.get("magic") != _MAGIC:
        raise ValueError("it is of another version")
    at = len(head) + 1
    found = {}
    for each in told["caches"]:
        places = []
        for medium, group, count, copies in each["places"]:
            hashes = np.frombuffer(body[at : at + 8 * count], "<u8")
            if max(copies.values(), default=0) > _MOST_COPIES:
                raise ValueError(f"a block with more than {_MOST_COPIES} copies")
            places.append(SavedPlace(medium, group, hashes, {int(block): number for block, number in copies.items()}))
            at += 8 * count
        tiers = tuple(TierDigest(*tier) for tier in each["tiers"])
        found[each["engine"], each["dp"]] = SavedCache(
            each["engine"],
            each["dp"],
            each["log_id"],
            StateDigest(each["next_sequence"], tiers),
            int(each["page_tokens"]),
            {
                int(number): CacheGroup(str(kind), int(window), int(size))
                for number, (kind, window, size) in each["groups"].items()
            },
            places,
        )
    return found


def _about(cache: SavedCache) -> dict[str, Any]:
    tiers = [[tier.medium, tier.group, tier.blocks, tier.mixed_hashes] for tier in cache.digest.tiers]
    return {
        "engine": cache.engine,
        "dp": cache.dp,
        "log_id": cache.log_id,
        "next_sequence": cache.digest.next_sequence,
        "tiers": tiers,
        "page_tokens": cache.page_tokens,
        "groups": cache.groups,
    }


def _put(
    places: list[Any], arrays: list[_Hashes], medium: str, group: int, hashes: _Hashes, copies: dict[int, int]
) -> None:
    if len(hashes):
        places.append([medium, group, len(hashes), copies])
        arrays.append(hashes)


def _by_set(numbers: Mapping[int, int]) -> tuple[_Hashes, dict[int, tuple[int, int]]]:
    """All hashes ordered by the numbers of their sets, and where each set's begin and end."""
    count = len(numbers)
    hashes, sets = np.empty(count, np.uint64), np.empty(count, np.int64)
    items = iter(numbers.items())
    for begin in range(0, count, _KEYS_AT_ONCE):
        some = list(islice(items, _KEYS_AT_ONCE))
        hashes[begin : begin + len(some)] = [block for block, _ in some]
        sets[begin : begin + len(some)] = [number for _, number in some]
    order = np.argsort(sets, kind="stable")
    kinds, begins = np.unique(sets[order], return_index=True)
    ends = [*begins.tolist(), count][1:]
    return hashes[order], dict(zip(kinds.tolist(), zip(begins.tolist(), ends, strict=True), strict=True))


def _members(cut: SavedCut) -> dict[tuple[int, int], list[int]]:
    """The sets that each cache is in, by its slot and a medium's plane."""
    members: dict[tuple[int, int], list[int]] = {}
    for number, planes in enumerate(cut.holders):
        for plane, slots in enumerate(planes):
            while slots:
                lowest = slots & -slots
                members.setdefault((lowest.bit_length() - 1, plane), []).append(number)
                slots ^= lowest
    return members
