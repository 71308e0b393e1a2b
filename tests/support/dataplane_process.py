"""A process with a data plane and a block of memory, told what to do line by line; for the data-plane tests.

As a program it serves; imported it gives the handle of such a program.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgrpc.dataplane import open_plane
from kvgrpc.dataplane.base import DataPlane, MemoryRange, Peer, Result, U64Array
from tests.support.faults.dataplane import wait
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


def view(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def noise(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """The same bytes in every process."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def digest(data: npt.NDArray[np.uint8]) -> str:
    return hashlib.sha256(data.tobytes()).hexdigest()


def u64(*columns: npt.ArrayLike) -> tuple[U64Array, U64Array, U64Array]:
    source, destination, nbytes = (np.atleast_1d(np.array(column, dtype=np.uint64)) for column in columns)
    return source, destination, nbytes


class PlaneProcess:
    """A peer in another process. Every call has a deadline; kill() and the context manager leave nothing running."""

    def __init__(self, name: str, nbytes: int, **settings: str) -> None:
        command = [sys.executable, "-m", "tests.support.dataplane_process", name, str(nbytes)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        started = self._read()
        self.address: bytes = started["address"].encode()
        self.block: int = started["block"]
        self.nbytes = nbytes

    def __enter__(self) -> PlaneProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def ask(self, command: str, **arguments: Any) -> Any:
        """Sends one command and waits for its answer."""
        self.tell(command, **arguments)
        return self._read()

    def tell(self, command: str, **arguments: Any) -> None:
        """Sends one command and waits for nothing."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def has_answered(self) -> bool:
        """Whether an answer waits to be read."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def answer(self) -> Any:
        """The answer to what was told."""
        return self._read()

    def digest(self, offset: int, nbytes: int) -> str:
        """sha256 of a part of its block."""
        return str(self.ask("digest", offset=offset, nbytes=nbytes))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            wait_until(lambda: Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        self.process.kill()
        self.process.communicate()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process ended"
        return json.loads(line)


def main(name: str, nbytes: int) -> None:
    plane = open_plane(name)
    block = plane.allocate(nbytes)
    plane.register([MemoryRange(block, nbytes)])
    print(json.dumps({"address": plane.address().decode(), "block": block}), flush=True)
    peers: dict[str, Peer] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if order["command"] in ("write", "fork") and order["address"] not in peers:
            peers[order["address"]] = plane.attach(order["address"].encode())
        answered = answer(plane, block, nbytes, order, peers.get(order.get("address", "")))
        print(json.dumps(answered), flush=True)


def answer(plane: DataPlane, block: int, nbytes: int, order: dict[str, Any], peer: Peer | None) -> object:
    memory = view(block, nbytes)
    if order["command"] == "digest":
        return digest(memory[order["offset"] : order["offset"] + order["nbytes"]])
    if order["command"] == "connections":
        return sorted(plane.connections_from(order["address"].encode()))
    if order["command"] == "write":  # noise to the start of a peer's block, as one descriptor
        memory[:] = noise(nbytes, order["seed"])
        assert peer is not None
        result: Result = wait(plane.submit(peer, *u64(block, order["block"], nbytes)), 30.0)
        return [result.outcome.name, result.nbytes]
    if order["command"] == "fork":  # in the child: what a submission says, and whether the child can exit
        assert peer is not None
        child = os.fork()
        if child == 0:
            refused = wait(plane.submit(peer, *u64(block, order["block"], 1)), 5.0)
            sys.exit(7 if "forked" in refused.detail else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    raise ValueError(order)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
