"""A prefix cache of blocks with two tiers, driven by real requests: what an engine's would say about them."""

from __future__ import annotations

import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from kvgrpc.events.log.digest import mix
from kvgrpc.events.model import BlockRemoved, BlockStored, Event

SAMPLE = Path(__file__).parents[1] / "data" / "conversation_trace_sample.jsonl"
BLOCK_TOKENS = 512


def requests(limit: int | None = None) -> Iterator[list[int]]:
    """The blocks of each request of the trace: the whole one where ``TEST_TRACE`` names it, else the sample."""
    return (blocks for _, blocks in timed_requests(limit))


def timed_requests(limit: int | None = None) -> Iterator[tuple[float, list[int]]]:
    """The same, each with the second in which it came."""
    with Path(os.environ.get("TEST_TRACE") or SAMPLE).open() as lines:
        for number, line in enumerate(lines):
            if limit is not None and number >= limit:
                return
            request = json.loads(line)
            yield request["timestamp"] / 1000, request["hash_ids"]


def hash_of(block: int) -> int:
    """As SGLang's: 64 bits with a sign, that look random."""
    return (mix(block) ^ 2**63) - 2**63


class PrefixCache:
    """Blocks of prefixes. The least recently used leaf is evicted first: from the device to the host, then for good."""

    def __init__(self, device_blocks: int, host_blocks: int) -> None:
        self._tiers = (_Tier("GPU", device_blocks), _Tier("CPU_PINNED", host_blocks))

    @property
    def content(self) -> dict[str, set[int]]:
        """Hashes of what is cached, by medium."""
        return {tier.medium: {hash_of(block) for block in tier.blocks} for tier in self._tiers if tier.blocks}

    def request(self, blocks: list[int]) -> list[Event]:
        """What happens when a request with these blocks is prefilled."""
        device, host = self._tiers
        blocks = blocks[: device.capacity]
        known = 0
        while known < len(blocks) and blocks[known] in device.blocks:
            known += 1
        happened: list[Event] = []
        evicted = device.make_room(len(blocks) - known, set(blocks))
        demoted = [block for block in evicted if block not in host.blocks]
        if demoted and host.capacity:
            dropped = host.make_room(len(demoted), set(demoted))
            if dropped:
                happened.append(BlockRemoved([hash_of(block) for block in dropped], host.medium))
            for block in demoted[: host.capacity]:
                # From leaf to root: each its own event, with the parent that it had.
                happened.append(_stored([block], device.parents[block], host.medium))
                host.put(block, device.parents[block])
        if evicted:
            happened.append(BlockRemoved([hash_of(block) for block in evicted], device.medium))
        for block in evicted:
            device.forget(block)
        if blocks[known:]:
            happened.append(_stored(blocks[known:], blocks[known - 1] if known else None, device.medium))
        for position, block in enumerate(blocks):
            device.put(block, blocks[position - 1] if position else None)
        # The leaf is the least recently used of its own request.
        for block in reversed(blocks):
            device.blocks.move_to_end(block)
        return happened


class _Tier:
    def __init__(self, medium: str, capacity: int) -> None:
        self.medium = medium
        self.capacity = capacity
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.parents: dict[int, int | None] = {}

    def put(self, block: int, parent: int | None) -> None:
        self.blocks[block] = None
        self.parents[block] = parent

    def forget(self, block: int) -> None:
        self.blocks.pop(block, None)
        del self.parents[block]

    def make_room(self, blocks: int, kept: set[int]) -> list[int]:
        """Takes the least recently used out, until so many fit; what they were is still known until ``forget``."""
        excess = max(0, len(self.blocks) + blocks - self.capacity)
        gone = list(itertools.islice((block for block in self.blocks if block not in kept), excess))
        for block in gone:
            del self.blocks[block]
        return gone


def _stored(blocks: list[int], parent: int | None, medium: str) -> BlockStored:
    return BlockStored(
        [hash_of(block) for block in blocks],
        None if parent is None else hash_of(parent),
        [],
        BLOCK_TOKENS,
        None,
        medium,
    )
