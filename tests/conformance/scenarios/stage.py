"""The servers of one scenario, and what happens to them. Real processes; faults come from signals and from the line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kvgrpc.client import SyncClient
from kvgrpc.errors import EngineNotFound
from kvgrpc.v1.index_service_pb2 import INDEX_SOURCE_STATE_CURRENT, IndexSource
from tests.conformance.scenarios.line import Line
from tests.conformance.scenarios.refusing import Refusing
from tests.support.cache_serving import LIMITS, PAGE_TOKENS, hashes_of, open_cache_rank, prompt
from tests.support.certificates import Authority
from tests.support.faults.storage import Fault, FaultyBackend, memory_backend
from tests.support.ports import free_port
from tests.support.rank_host import RankProcess
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
BLOCK_TOKENS = 16
# Of a page: a caller has time to end the operation before its next one.
SLOW_READ_SECONDS = 0.5


class Command:
    """``kvgrpc serve ...`` in a process of its own, at an address that it keeps."""

    def __init__(self, *words: str, unix: str = "") -> None:
        self.port = 0 if unix else free_port()
        self.address = unix or f"127.0.0.1:{self.port}"
        self._words = words
        self.restart()

    def restart(self) -> None:
        command = [sys.executable, "-m", "kvgrpc", "serve", *self._words, "--listen", self.address]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), f"{self._words} ended with {self._process.wait()}"

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(10)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Publisher:
    """A rank that publishes what a scenario says, and keeps ``buffer_steps`` batches."""

    def __init__(self, engine: str, registry: str = "", **events: Any) -> None:
        self.port = free_port()
        self._open: Callable[[], RankProcess] = lambda: RankProcess(
            engine,
            "PREFILL",
            listen=f"127.0.0.1:{self.port}",
            events={"publisher": "null", **events},
            **({"registry": registry} if registry else {}),
        ).opened()
        self._rank = self._open()

    def restart(self) -> None:
        self._rank.end()
        self._rank = self._open()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._rank.pid, number)

    def publish(self, batches: Sequence[Sequence[Any]]) -> None:
        self._rank.call("publish", [payload for batch in batches for payload in payloads_of(*batch)])

    def end(self) -> None:
        self._rank.end()


class Cache:
    """A rank with a hierarchical cache: storage has the pages of ``stored_tokens`` tokens from 0 on."""

    def __init__(
        self, folder: Path, stored_tokens: int, threshold_tokens: int = PAGE_TOKENS, slow_reads: bool = False
    ) -> None:
        backend = FaultyBackend(memory_backend())
        limits = replace(LIMITS, threshold_tokens=threshold_tokens, batch_pages=1)
        self._rank = open_cache_rank(folder, storage=backend, limits=limits)
        self._rank.store(hashes_of(prompt(stored_tokens // PAGE_TOKENS)))
        if slow_reads:
            backend.fault = lambda call, key: Fault(delay=SLOW_READ_SECONDS) if call == "read" else None
        self.port = int(self._rank.address.rpartition(":")[2])

    def end(self) -> None:
        self._rank.close()


class Stage:
    """All of them by name, each behind a line that can be cut."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: dict[str, Any] = {}
        self._lines: dict[str, Line] = {}

    def address(self, name: str) -> str:
        """``NAME``: as the driver dials it; ``NAME.direct``: its own; ``NAME.ca``: who signed its certificate."""
        name, _, which = name.partition(".")
        if which == "ca":
            return self._authority.ca_file
        server = self._servers[name]
        if server.port == 0:
            return str(server.address)
        return f"127.0.0.1:{server.port}" if which else self._lines[name].address

    def act(self, step: dict[str, Any]) -> None:
        """One step that is not the driver's."""
        (word,) = step.keys() & _ACTS.keys()
        settings = {key: self.filled(value) for key, value in step.items() if key != word}
        _ACTS[word](self, step[word], **settings)

    def filled(self, value: Any) -> Any:
        """``$NAME`` anywhere in a step as the address of that server."""
        if isinstance(value, str) and value.startswith("$"):
            return ",".join(self.address(each.strip().removeprefix("$")) for each in value.split(","))
        if isinstance(value, dict):
            return {key: self.filled(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.filled(each) for each in value]
        return value

    def start(self, kind: str, name: str, **settings: Any) -> None:
        server = self._servers[name] = self._open(kind, settings)
        if server.port:
            self._lines[name] = Line(server.port)

    def _open(self, kind: str, settings: dict[str, Any]) -> Any:
        if kind == "registry":
            return self._registry(**settings)
        if kind == "index":
            return Command("index", *(word for source in settings["sources"] for word in ("--source", source)))
        if kind == "publisher":
            return Publisher(**settings)
        if kind == "cache":
            return Cache(self._folder, **settings)
        assert kind == "refusing", kind
        return Refusing()

    def _registry(self, lease_ttl: float, secret: str = "", unix: bool = False) -> Command:
        words = ["registry", "--lease-ttl", str(lease_ttl)]
        if secret:
            tokens = self._folder / "tokens"
            tokens.write_text(f"rank:{secret}\n")
            tokens.chmod(0o600)
            self._authority = Authority(self._folder)
            own = self._authority.sign("registry", "IP:127.0.0.1")
            words += ["--cert-file", own.cert_file, "--key-file", own.key_file, "--tokens-file", str(tokens)]
        return Command(*words, unix=f"unix:{self._folder}/registry.sock" if unix else "")

    def send(self, number: signal.Signals, name: str) -> None:
        self._servers[name].signal(number)

    def restart(self, name: str) -> None:
        self._servers[name].restart()

    def publish(self, batches: Sequence[Sequence[Any]], at: str) -> None:
        self._servers[at].publish(batches)

    def await_ranks(self, engine: str, at: str, ranks: int) -> None:
        """The registry itself, asked by another client, says so."""
        address = f"127.0.0.1:{self._servers[at].port}"
        wait_until(lambda: registered(address, engine) == ranks)

    def await_sources(self, sources: int, at: str, next: str) -> None:
        """The index itself, asked by another client, has all batches before ``next`` of so many caches."""
        with SyncClient(f"127.0.0.1:{self._servers[at].port}", timeout=10.0) as client:
            fits = [int(next)] * sources
            wait_until(lambda: [source.freshness.next_sequence for source in current(client)] == fits)

    def line(self, word: str, name: str) -> None:
        getattr(self._lines[name], word)()

    def move(self, name: str, to: str) -> None:
        """Who dials ``name`` from now on reaches another server."""
        self._lines[name].move(self._servers[to].port)

    def end(self) -> None:
        for line in self._lines.values():
            line.close()
        for server in self._servers.values():
            server.end()


_ACTS: dict[str, Any] = {
    "start": Stage.start,
    "restart": Stage.restart,
    "kill": lambda stage, name: stage.send(signal.SIGKILL, name),
    "freeze": lambda stage, name: stage.send(signal.SIGSTOP, name),
    "thaw": lambda stage, name: stage.send(signal.SIGCONT, name),
    "cut": lambda stage, name: stage.line("cut", name),
    "mend": lambda stage, name: stage.line("mend", name),
    "stall": lambda stage, name: stage.line("stall", name),
    "flow": lambda stage, name: stage.line("flow", name),
    "move": Stage.move,
    "publish": Stage.publish,
    "await": Stage.await_ranks,
    "await_sources": Stage.await_sources,
}


def registered(address: str, engine: str) -> int:
    with SyncClient(address, timeout=10.0) as client:
        try:
            return client.get_engine(engine).registered_ranks
        except EngineNotFound:
            return 0


def current(client: SyncClient) -> list[IndexSource]:
    return client.list_sources(states=[INDEX_SOURCE_STATE_CURRENT])


def payloads_of(kind: str, *told: Any) -> list[bytes]:
    """One batch with one event, as an engine would write it; ``many``: so many batches, each of so many new blocks."""
    if kind == "garbage":
        return [b"\xc1"]
    if kind == "many":
        count, each = told
        return [
            _batch(_stored(range(number * each + 1000, (number + 1) * each + 1000), "GPU")) for number in range(count)
        ]
    if kind == "store":
        return [_batch(_stored(*told))]
    if kind == "remove":
        return [_batch({"type": "BlockRemoved", "block_hashes": told[0], "medium": told[1]})]
    return [_batch({"type": "AllBlocksCleared"} if kind == "clear" else {"type": told[0], "block_hashes": [1]})]


def _stored(hashes: Sequence[int], medium: str) -> dict[str, Any]:
    tokens = [7] * BLOCK_TOKENS * len(hashes)
    stored = {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": None, "token_ids": tokens}
    return {**stored, "block_size": BLOCK_TOKENS, "medium": medium}


def _batch(event: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([time.time(), [event], 0])


SCENARIOS = json.loads((Path(__file__).parent / "scenarios.json").read_text())
