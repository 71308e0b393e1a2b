"""kvgrpc behind the common face, through its public API alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import kvgrpc.dataplane
from benchmarks.sides.base import Setting
from benchmarks.sides.memory import Memory, Shape
from benchmarks.sides.null_plane import NullDataPlane
from kvgrpc.dataplane.base import DataPlane, MemoryRange
from kvgrpc.model import Pool, PoolKind, Region, Role
from kvgrpc.server import AuxBuffer, Rank, RankConfig, open_rank
from kvgrpc.transfer import KVReceiver, KVSender
from kvgrpc.transfer.runtime.decode_manager import DecodeManager
from kvgrpc.transfer.runtime.prefill_manager import PrefillManager

CLOSE_DEADLINE = 5.0
JOURNAL_BYTES = 2**30


class KvgrpcPrefill:
    """A prefill rank with the registry embedded."""

    page_type = np.int32

    def __init__(self, setting: Setting) -> None:
        self._rank, self.memory = _open(setting, Role.PREFILL, registry="embedded")
        self.bootstrap = self._rank.address
        manager = self._rank.transfer
        assert isinstance(manager, PrefillManager)
        self._manager = manager

    def sender(self, room: int) -> KVSender:
        return KVSender(self._manager, self.bootstrap, room)

    def close(self) -> None:
        self.memory.forget()
        self._rank.close(CLOSE_DEADLINE)
        self._rank.plane.close(CLOSE_DEADLINE)


class KvgrpcDecode:
    """A decode rank that reads the prefill's registry."""

    page_type = np.int32

    def __init__(self, setting: Setting, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._rank, self.memory = _open(setting, Role.DECODE)
        manager = self._rank.transfer
        assert isinstance(manager, DecodeManager)
        self._manager = manager

    def receiver(self, room: int, bootstrap: str | None = None) -> KVReceiver:
        return KVReceiver(self._manager, bootstrap or self._bootstrap, room)

    def settled(self, receivers: Sequence[KVReceiver]) -> bool:
        return all(receiver.prefill_ready for receiver in receivers)

    def close(self) -> None:
        self.memory.forget()
        self._rank.close(CLOSE_DEADLINE)
        self._rank.plane.close(CLOSE_DEADLINE)


def open_publishing_rank(**more: object) -> Rank[Any]:
    """A rank with live events in the seeds' form, and a journal that keeps every batch of a replay row."""
    setting = Setting("kvgrpc", "null", Shape(regions=1, pages=1, page_bytes=4096, aux_items=1))
    events = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0", "journal_bytes": JOURNAL_BYTES}
    events |= {"encoding": "array", "clear_first": False} | more
    return _open(setting, Role.PREFILL, events=events)[0]


def _open(setting: Setting, role: Role, **options: Any) -> tuple[Rank[Any], Memory]:
    shape = setting.shape
    plane = _open_plane(setting.plane)
    memory = Memory(shape, plane.allocate)
    plane.register([MemoryRange(address, shape.region_bytes) for address in memory.regions])
    regions = tuple(
        Region(number // 2, "kv"[number % 2], address, shape.page_bytes, shape.page_bytes)
        for number, address in enumerate(memory.regions)
    )
    rank = open_rank(
        RankConfig(
            engine="bench-prefill" if role is Role.PREFILL else "bench-decode",
            role=role,
            pools=(Pool("kv", PoolKind.KV, 16, shape.pages, "bfloat16", regions),),
            aux=(AuxBuffer(memory.aux, shape.aux_item_bytes, shape.aux_items),),
            data_plane=plane,
            **options,
        )
    )
    return rank, memory


def _open_plane(name: str) -> DataPlane:
    return NullDataPlane() if name == "null" else kvgrpc.dataplane.open_plane(name)
