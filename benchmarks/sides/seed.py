"""The seeds' protocol behind the common face."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.baselines.bootstrap import BootstrapServer
from benchmarks.baselines.disaggregation import Buffers, DecodeManager, PrefillManager, Receiver, Sender
from benchmarks.baselines.engines import Engine, MooncakeEngine, NullEngine
from benchmarks.sides.base import Setting
from benchmarks.sides.memory import Memory


class SeedPrefill:
    """Bootstrap server and prefill manager in one process."""

    page_type = np.int64

    def __init__(self, setting: Setting) -> None:
        self._server = BootstrapServer()
        self.bootstrap = self._server.address
        engine, self.memory, buffers = _start_engine(setting)
        self._manager = PrefillManager(engine, buffers, self.bootstrap)

    def sender(self, room: int) -> Sender:
        return Sender(self._manager, self.bootstrap, room)

    def close(self) -> None:
        self.memory.forget()
        self._manager.close()
        self._server.close()


class SeedDecode:
    """A decode manager."""

    page_type = np.int64

    def __init__(self, setting: Setting, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        engine, self.memory, buffers = _start_engine(setting)
        self._manager = DecodeManager(engine, buffers)

    def receiver(self, room: int, bootstrap: str | None = None) -> Receiver:
        return Receiver(self._manager, bootstrap or self._bootstrap, room)

    def settled(self, receivers: Sequence[Receiver]) -> bool:
        return True  # what its constructor does is over when it returns

    def close(self) -> None:
        self.memory.forget()
        self._manager.close()


def _start_engine(setting: Setting) -> tuple[Engine, Memory, Buffers]:
    engine: Engine = NullEngine() if setting.plane == "null" else MooncakeEngine()
    shape = setting.shape
    memory = Memory(shape, engine.allocate)
    for address in memory.regions:
        engine.register(address, shape.region_bytes)
    engine.register(memory.aux, shape.aux_items * shape.aux_item_bytes)
    return engine, memory, Buffers(tuple(memory.regions), shape.page_bytes, memory.aux, shape.aux_item_bytes)
