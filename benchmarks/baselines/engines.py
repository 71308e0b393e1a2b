"""What the seeds' managers move bytes with: Mooncake's blocking writes, or nothing at all."""

from __future__ import annotations

import importlib
import mmap
import os
from typing import Any, Protocol

import numpy as np

# Before the import of mooncake.engine, which reads them: quiet, TCP, and a queue that holds any batch of ours.
MOONCAKE_ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_FORCE_TCP": "1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TRANSFER_TIMEOUT": "30",
}


class Engine(Protocol):
    """Blocking one-sided writes, as the seeds call them. Thread-safe."""

    session_id: str

    def allocate(self, nbytes: int) -> int:
        """Address of zeroed, page-aligned memory that lives as long as the engine."""

    def register(self, address: int, nbytes: int) -> None:
        """Lets peers write there."""

    def transfer_sync(self, session_id: str, source: int, destination: int, nbytes: int) -> int:
        """Writes, and returns 0 when the bytes are in place."""

    def close(self) -> None:
        """Ends the engine."""


class NullEngine:
    """Succeeds without doing anything: what remains is the cost of control."""

    session_id = "null"

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []

    def allocate(self, nbytes: int) -> int:
        return allocate(nbytes, self._maps)

    def register(self, address: int, nbytes: int) -> None: ...

    def transfer_sync(self, session_id: str, source: int, destination: int, nbytes: int) -> int:
        return 0

    def close(self) -> None: ...


class MooncakeEngine:
    """Mooncake over TCP on loopback."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._maps: list[mmap.mmap] = []
        self._engine = mooncake_engine(host)
        self.session_id = f"{host}:{self._engine.get_rpc_port()}"

    @property
    def raw(self) -> Any:
        """Mooncake's own object, for whoever writes batches."""
        return self._engine

    def allocate(self, nbytes: int) -> int:
        return allocate(nbytes, self._maps)

    def register(self, address: int, nbytes: int) -> None:
        if self._engine.register_memory(address, nbytes) != 0:
            raise RuntimeError(f"Mooncake refused {nbytes} bytes at {address:#x}")

    def transfer_sync(self, session_id: str, source: int, destination: int, nbytes: int) -> int:
        return int(self._engine.transfer_sync_write(session_id, source, destination, nbytes))

    def close(self) -> None:
        self._engine = None


def mooncake_engine(host: str) -> Any:
    """An initialised TransferEngine on TCP with peer-to-peer handshake. Raises RuntimeError when it cannot start."""
    for name, value in MOONCAKE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("Mooncake did not initialise")
    return engine


def mooncake_is_here() -> bool:
    """True when the module can be imported; false also when a system library of it is missing."""
    try:
        importlib.import_module("mooncake.engine")
    except ImportError:
        return False
    return True


def allocate(nbytes: int, keep: list[mmap.mmap], flags: int = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) -> int:
    """Address of zeroed memory in huge pages where the system has them; it lives as long as its map in ``keep``."""
    memory = mmap.mmap(-1, nbytes, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    keep.append(memory)
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
