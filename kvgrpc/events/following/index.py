"""An index of who holds a request's beginning: many caches in one table, which answers for all of them at once.

Pure: no clock, thread or socket; belongs to one thread. A block that several caches hold is one entry, about 100 bytes
(a dictionary slot and the hash), whoever holds it; the sets of holders are shared by all blocks that have the same.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

from kvgrpc.model import Tier

# Names of tiers that are told apart, those of today's engines in any case; blocks in others count for no prefix.
MAX_MEDIA = 32
_KNOWN_MEDIA = ("GPU", "CPU", "CPU_PINNED", "DISK", "STORAGE", "EXTERNAL")
LEAST_GARBAGE = 4096
# Emptied caches leave the sets of holders together: when there is one for so many sets, and never more than so many of
# them. An engine may say in one batch that it was emptied a hundred thousand times.
SETS_OF_A_CLEAR, MOST_STALE = 64, 64
# Blocks that come together are looked at together.
_TOGETHER = 32
# Of a request so many blocks at a time: most requests begin as others did, and go on as nobody's.
_LOOKED_UP = 128

# The caches that hold a block, a bit for each, in one number for each medium; without the last ones that are 0.
Holders = tuple[int, ...]
# The caches that hold a block on the device, on device or host, there or on a disk of their own, anywhere.
Reach = tuple[int, int, int, int]
# Where caches end in a request, in order: after so many blocks these, a bit for each.
_Ends = list[tuple[int, int]]
_NOBODY: Holders = ()
_NOWHERE: Reach = (0, 0, 0, 0)


def tier_of(medium: str) -> Tier:
    """The tier that an engine's name for it (in capitals) means."""
    if medium == "GPU":
        return Tier.DEVICE
    return Tier.HOST if medium in ("CPU", "CPU_PINNED") else Tier.STORAGE


class Reached(enum.IntEnum):
    """The distance to a block, the fastest first: of the proto's tiers the last is told in two."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    STORE = 3


def reach_of(medium: str) -> Reached:
    """The reach of an engine's name for a medium (in capitals)."""
    if medium == "GPU":
        return Reached.DEVICE
    if medium in ("CPU", "CPU_PINNED"):
        return Reached.HOST
    return Reached.DISK if medium == "DISK" else Reached.STORE


class Match(NamedTuple):
    """The number of leading blocks of a request that one cache holds.

    ``device`` of them lie on the device without a gap, ``host`` on device or host, ``disk`` there or on a disk of its
    own, ``storage`` anywhere at all; each is at least the one before it.
    """

    device: int
    host: int
    disk: int
    storage: int


class BlockIndex:
    """Hash of a block (unsigned 64 bits, ``digest.hash_key``) -> which caches hold it in which tier."""

    def __init__(self) -> None:
        # Blocks refer to sets of holders by number, so that a cache that empties changes the sets and no block.
        self._numbers: dict[int, int] = {}
        self._holders: list[Holders] = [_NOBODY]
        self._reach: list[Reach] = [_NOWHERE]
        self._number_of: dict[Holders, int] = {_NOBODY: 0}
        self._media = {medium: plane for plane, medium in enumerate(_KNOWN_MEDIA)}
        self._reached = [reach_of(medium) for medium in _KNOWN_MEDIA]
        self._caches: list[BlockSet | None] = []
        self._shown = 0
        # Places of caches that were emptied, which sets have still: nobody looks there, and no cache gets them.
        self._stale = 0
        self._garbage = 0
        self._sweep_at = LEAST_GARBAGE
        self._largest_page = 1

    @property
    def blocks(self) -> int:
        """Different blocks that somebody holds; for some time after a cache emptied, more."""
        return len(self._numbers)

    @property
    def largest_page(self) -> int:
        """Tokens that no block of a cache has more of."""
        return self._largest_page

    def note_page(self, tokens: int) -> None:
        """Blocks of a cache have so many."""
        self._largest_page = max(self._largest_page, tokens)

    def cache(self) -> BlockSet:
        """Room for the contents of one more cache, which ``score`` does not see before it is shown."""
        slot = self._free_slot()
        cache = self._caches[slot] = BlockSet(self, slot)
        return cache

    def score(self, hashes: Sequence[int], among: Iterable[BlockSet] | None = None) -> dict[BlockSet, Match]:
        """For each shown cache (of these; None: of all) that holds the first block, how many leading blocks of
        ``hashes`` it holds."""
        return {cache: match for _, caches in self.leading(hashes, among) for cache, match in caches}

    def leading(
        self, hashes: Sequence[int], among: Iterable[BlockSet] | None = None
    ) -> Iterator[tuple[int, Iterator[tuple[BlockSet, Match]]]]:
        """``score`` by how many leading blocks a cache holds anywhere, the most first: whoever asks for the best looks
        at no other."""
        tiers = self._ends(self._shown if among is None else self._shown & _slots(among), hashes)
        nearer = [None if tier == tiers[-1] else _by_slot(tier) for tier in tiers[:-1]]
        for blocks, slots in reversed(tiers[-1]):
            if blocks:
                yield blocks, self._matches(slots, blocks, nearer)

    def on_host(self, hashes: Sequence[int], among: Iterable[BlockSet]) -> dict[BlockSet, int]:
        """For each of these that is shown, how many leading blocks lie on its host itself, whatever its device has."""
        caches = {cache.slot: cache for cache in among}
        left = self._shown & _slots(caches.values())
        ends: dict[int, int] = {}
        before: int | None = -1
        for position, number in enumerate(map(self._numbers.get, hashes)):
            if number == before:
                continue
            before = number
            there = 0 if number is None else self._on_host(number)
            _note_ends(ends, left & ~there, position)
            left &= there
            if not left:
                break
        _note_ends(ends, left, len(hashes))
        return {caches[slot]: blocks for slot, blocks in ends.items()}

    def match(self, slot: int, hashes: Sequence[int]) -> Match:
        """Returns how many leading blocks one cache holds. For BlockSet."""
        return Match(*(tier[-1][0] for tier in self._ends(1 << slot, hashes)))

    def plane(self, medium: str) -> int | None:
        """The place of a medium's holders (in capitals) in Holders; None: it is one too many. For BlockSet."""
        plane = self._media.get(medium)
        if plane is None and len(self._media) < MAX_MEDIA:
            plane = self._media[medium] = len(self._media)
            self._reached.append(reach_of(medium))
        return plane

    def blocks_of(self, slot: int, plane: int) -> list[int]:
        """The blocks that one cache has in one medium. For BlockSet."""
        theirs = {
            number for number, planes in enumerate(self._holders) if plane < len(planes) and planes[plane] >> slot & 1
        }
        return [block for block, number in self._numbers.items() if number in theirs]

    def number_of(self, holders: Holders) -> int:
        """The number of a set of holders, made where it is new. For BlockSet."""
        holders = _stripped(list(holders))
        number = self._number_of.get(holders)
        if number is None:
            number = self._number_of[holders] = len(self._holders)
            self._holders.append(holders)
            self._reach.append(self._reach_of(holders))
        return number

    def tables(self) -> tuple[dict[int, int], list[Holders]]:
        """Blocks -> numbers, and numbers -> holders. For BlockSet."""
        return self._numbers, self._holders

    def cut(self) -> tuple[dict[int, int], list[Holders]]:
        """Blocks -> numbers, and numbers -> holders, as they are now: a tenth of a second for six million."""
        return dict(self._numbers), list(self._holders)

    def show(self, slot: int) -> None:
        """From now on ``score`` sees this cache. For BlockSet."""
        self._shown |= 1 << slot

    def hide(self, slot: int) -> None:
        """From now on ``score`` does not see it. For BlockSet."""
        self._shown &= ~(1 << slot)

    def empty(self, slot: int, blocks: int) -> int:
        """Nothing is in this cache any more: its slot from now on. Sets and blocks stay as they are. For BlockSet."""
        if not blocks:
            return slot
        fresh = self._free_slot()
        self._caches[fresh], self._caches[slot] = self._caches[slot], None
        if self._shown >> slot & 1:
            self.hide(slot)
            self.show(fresh)
        self._stale |= 1 << slot
        self._garbage += blocks
        if self._garbage > max(LEAST_GARBAGE, len(self._numbers) // 2):
            self._sweep()
        elif (stale := self._stale.bit_count()) >= MOST_STALE or stale * SETS_OF_A_CLEAR >= len(self._holders):
            self._strip()
        return fresh

    def tidy(self) -> None:
        """Sets that no block has any more are forgotten now and then. For BlockSet, between two events."""
        if len(self._holders) > self._sweep_at:
            self._sweep()

    def free(self, slot: int) -> None:
        """The room is for another cache. For BlockSet."""
        self.hide(slot)
        self._caches[slot] = None

    def _ends(self, slots: int, hashes: Sequence[int]) -> tuple[_Ends, _Ends, _Ends, _Ends]:
        """Of each reach."""
        device = host = disk = storage = slots
        ends: tuple[_Ends, _Ends, _Ends, _Ends] = ([], [], [], [])
        # Most questions of strangers end at their first block.
        is_held = bool(hashes) and hashes[0] in self._numbers
        for position, number in _changes(self._numbers.get, hashes if is_held else hashes[:1]):
            on_device, to_host, to_disk, anywhere = _NOWHERE if number is None else self._reach[number]
            if device & ~on_device:
                ends[0].append((position, device & ~on_device))
                device &= on_device
            if host & ~to_host:
                ends[1].append((position, host & ~to_host))
                host &= to_host
            if disk & ~to_disk:
                ends[2].append((position, disk & ~to_disk))
                disk &= to_disk
            if storage & ~anywhere:
                ends[3].append((position, storage & ~anywhere))
                storage &= anywhere
            if not storage:
                break
        for tier, left in zip(ends, (device, host, disk, storage), strict=True):
            if left:
                tier.append((len(hashes), left))
        return ends

    def _matches(
        self, slots: int, blocks: int, nearer: Sequence[dict[int, int] | None]
    ) -> Iterator[tuple[BlockSet, Match]]:
        """``nearer``: of each reach but the furthest, where a slot's blocks end; None: where all do."""
        on_device, to_host, to_disk = nearer
        alike = Match(blocks, blocks, blocks, blocks)
        for slot in _each(slots):
            cache = self._caches[slot]
            if cache is None:
                continue
            if on_device is None:  # then no tier between them differs either
                yield cache, alike
                continue
            to = blocks if to_host is None else to_host[slot], blocks if to_disk is None else to_disk[slot]
            yield cache, Match(on_device[slot], *to, blocks)

    def _free_slot(self) -> int:
        for slot, cache in enumerate(self._caches):
            if cache is None and not self._stale >> slot & 1:
                return slot
        self._caches.append(None)
        return len(self._caches) - 1

    def _strip(self) -> None:
        """The sets lose the caches that were emptied."""
        others, self._stale = ~self._stale, 0
        self._holders = [_stripped([plane & others for plane in holders]) for holders in self._holders]
        self._reach = [self._reach_of(holders) for holders in self._holders]
        self._number_of = {}
        for number, holders in enumerate(self._holders):
            self._number_of.setdefault(holders, number)
        self._forget_steps()

    def _sweep(self) -> None:
        """Forgets blocks that nobody holds and sets that no block has."""
        if self._stale:
            self._strip()
        before = self._holders
        self._holders, self._reach, self._number_of = [_NOBODY], [_NOWHERE], {_NOBODY: 0}
        self._numbers = {
            block: self.number_of(before[number]) for block, number in self._numbers.items() if before[number]
        }
        self._garbage = 0
        self._sweep_at = max(2 * len(self._holders), len(self._numbers) // 4) + LEAST_GARBAGE
        self._forget_steps()

    def _forget_steps(self) -> None:
        """Numbers of sets changed their meaning."""
        for cache in self._caches:
            if cache is not None:
                cache.forget_steps()

    def _on_host(self, number: int) -> int:
        held = 0
        for reached, plane in zip(self._reached, self._holders[number], strict=False):
            held |= plane if reached is Reached.HOST else 0
        return held

    def _reach_of(self, holders: Holders) -> Reach:
        reach = [0, 0, 0, 0]
        for nearest, plane in zip(self._reached, holders, strict=False):
            for further in range(nearest, 4):
                reach[further] |= plane
        return reach[0], reach[1], reach[2], reach[3]


class BlockSet:
    """The blocks that one cache holds, by medium, as a part of an index.

    A block that is stored twice is there until it is removed twice (engines keep several copies); what is removed and
    was not there is left alone. Media are named in capitals (``digest.medium_key``).
    """

    def __init__(self, index: BlockIndex, slot: int) -> None:
        self._index = index
        self._slot = slot
        self._media: dict[str, _Medium] = {}

    @property
    def slot(self) -> int:
        """Its place among the caches of the index, until it is emptied."""
        return self._slot

    def __len__(self) -> int:
        """Placements: a block in two media counts twice."""
        return sum(medium.count for medium in self._media.values())

    def count(self, medium: str) -> int:
        """Different blocks in a medium."""
        return self._media[medium].count if medium in self._media else 0

    def counts(self) -> dict[str, int]:
        """Different blocks in each medium that has any."""
        return {name: medium.count for name, medium in sorted(self._media.items()) if medium.count}

    def media(self) -> dict[str, tuple[int, dict[int, int]]]:
        """Of each medium where it stands in Holders, and copies of the blocks that have more than one."""
        return {name: (medium.plane, dict(medium.copies)) for name, medium in self._media.items() if medium.count}

    def tells(self, medium: str) -> bool:
        """True if blocks in this medium can be here; for one index that never changes."""
        return self._index.plane(medium) is not None

    def stored(self, medium: str, hashes: Sequence[int]) -> int:
        """A copy of each came; how many blocks were not there before."""
        numbers, _ = self._index.tables()
        place = self._place(medium)
        if len(hashes) >= _TOGETHER and self._stored_together(place, hashes):
            return len(hashes)
        steps, copies, appeared = place.joining, place.copies, 0
        for block in hashes:
            before = numbers.get(block, 0)
            after = steps.get(before)
            if after is None:
                after = steps[before] = self._step(before, place.plane, present=True)
            if after != before:
                numbers[block] = after
                appeared += 1
            else:
                copies[block] = copies.get(block, 1) + 1
        place.count += appeared
        self._index.tidy()
        return appeared

    def _stored_together(self, place: _Medium, hashes: Sequence[int]) -> bool:
        """Stores them in a third of the time; False if not all have the same holders, as most of a snapshot have."""
        numbers, _ = self._index.tables()
        before = numbers.get(hashes[0], 0)
        after = self._step(before, place.plane, present=True)
        held = list(map(numbers.get, hashes, repeat(0)))
        if after == before or held.count(before) != len(held) or len(set(hashes)) != len(held):
            return False
        numbers.update(zip(hashes, repeat(after)))
        place.count += len(held)
        self._index.tidy()
        return True

    def removed(self, medium: str, hashes: Iterable[int]) -> tuple[list[int], int]:
        """A copy of each that was there went: those, and how many of the copies were the last."""
        numbers, _ = self._index.tables()
        place = self._place(medium)
        steps, copies, gone, vanished = place.leaving, place.copies, [], 0
        for block in hashes:
            before = numbers.get(block, 0)
            after = steps.get(before)
            if after is None:
                after = steps[before] = self._step(before, place.plane, present=False)
            if after == before:
                continue
            gone.append(block)
            if block in copies:
                copies[block] -= 1
                if copies[block] == 1:
                    del copies[block]
                continue
            if after:
                numbers[block] = after
            else:
                del numbers[block]
            vanished += 1
        place.count -= vanished
        self._index.tidy()
        return gone, vanished

    def forget(self, medium: str) -> None:
        """Lets go of what an empty medium takes."""
        place = self._media.get(medium)
        if place is not None and not place.count:
            del self._media[medium]

    def cleared(self, medium: str | None = None) -> None:
        """Nothing is there any more; of one medium. That looks at each block of the index where others hold some."""
        if medium is None or set(self.counts()) <= {medium}:
            self._slot = self._index.empty(self._slot, len(self))
            self._media.clear()
        elif self.count(medium):
            place = self._media[medium]
            place.copies.clear()
            self.removed(medium, self._index.blocks_of(self._slot, place.plane))
            self.forget(medium)

    def show(self, instead_of: BlockSet | None = None) -> None:
        """From now on the index answers with this, in one step in place of the other, which is dropped."""
        if instead_of is not None:
            instead_of.drop()
        self._index.show(self._slot)

    def hide(self) -> None:
        """The index answers without this until it is shown again."""
        self._index.hide(self._slot)

    def drop(self) -> None:
        """Takes it out of the index. It must not be used afterwards."""
        self.cleared()
        self._index.free(self._slot)

    def match(self, hashes: Sequence[int]) -> Match:
        """Returns how many leading blocks of ``hashes`` are here, whether or not the index shows it."""
        return self._index.match(self._slot, hashes)

    def media_of(self, block: int) -> frozenset[str]:
        """The media of this cache that hold the block."""
        numbers, holders = self._index.tables()
        planes = holders[numbers.get(block, 0)]
        return frozenset(
            name
            for name, place in self._media.items()
            if place.plane < len(planes) and planes[place.plane] >> self._slot & 1
        )

    def forget_steps(self) -> None:
        """Sets of holders got other numbers. For BlockIndex."""
        for place in self._media.values():
            place.joining.clear()
            place.leaving.clear()

    def _place(self, medium: str) -> _Medium:
        place = self._media.get(medium)
        if place is None:
            plane = self._index.plane(medium)
            if plane is None:
                raise ValueError(f"this index does not tell {medium!r} apart")
            place = self._media[medium] = _Medium(plane)
        return place

    def _step(self, number: int, plane: int, *, present: bool) -> int:
        """The number of the set that has us or not; the same number where it is so already."""
        _, holders = self._index.tables()
        planes, bit = list(holders[number]), 1 << self._slot
        planes.extend([0] * (plane + 1 - len(planes)))
        if bool(planes[plane] & bit) == present:
            return number
        planes[plane] ^= bit
        return self._index.number_of(tuple(planes))


class _Medium:
    """One medium of one cache. A step leads from the number of a set of holders to that of the same with, or without,
    this cache."""

    __slots__ = ("copies", "count", "joining", "leaving", "plane")

    def __init__(self, plane: int) -> None:
        self.plane = plane
        self.count = 0
        # Of blocks with more than one copy only.
        self.copies: dict[int, int] = {}
        self.joining: dict[int, int] = {}
        self.leaving: dict[int, int] = {}


def _slots(caches: Iterable[BlockSet]) -> int:
    slots = 0
    for cache in caches:
        slots |= 1 << cache.slot
    return slots


def _stripped(planes: list[int]) -> Holders:
    while planes and not planes[-1]:
        planes.pop()
    return tuple(planes)


def _note_ends(ends: dict[int, int], slots: int, position: int) -> None:
    for slot in _each(slots):
        ends[slot] = position


def _by_slot(tier: _Ends) -> dict[int, int]:
    ends: dict[int, int] = {}
    for position, slots in tier:
        _note_ends(ends, slots, position)
    return ends


def _each(slots: int) -> Iterator[int]:
    while slots:
        lowest = slots & -slots
        yield lowest.bit_length() - 1
        slots ^= lowest


def _changes(look_up: Callable[[int], int | None], hashes: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    """Yields each place where another number comes than before it, and that number. Whoever stops where nobody holds
    anything has not looked up the rest."""
    before: int | None = -1
    for begin in range(0, len(hashes), _LOOKED_UP):
        numbers = list(map(look_up, hashes[begin : begin + _LOOKED_UP]))
        at, end = 0, len(numbers)
        while at < end:
            number = numbers[at]
            if number != before:
                yield begin + at, number
                before = number
            while numbers[at : at + _TOGETHER].count(number) == _TOGETHER:
                at += _TOGETHER
            while at < end and numbers[at] == number:
                at += 1
