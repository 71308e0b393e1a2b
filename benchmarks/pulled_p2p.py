"""Pulls of kvgrpc beside those of vLLM's own tier ``p2p``: ``python -m benchmarks.pulled_p2p --nixl FOLDER``.

In vLLM's environment; NIXL, which that tier needs, comes from a folder of its own:
``pip install --no-deps --target FOLDER nixl==1.5.1 nixl-cu13==1.5.1``. Two engines have both tiers, and each request
says which one may be asked, so that engines, prompts and machine are the same. What is asked for has been computed by
the first one and lies in its host memory; ``computed`` is another prompt that long. The orders of the three rotate.
Then the first engine is stopped (SIGSTOP), and killed, and the second is asked for what it has.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.warm import LONGEST, first_token, prompt_of, vllm_engine
from kvgrpc.client import SyncClient
from kvgrpc.server import RegistryServer
from kvgrpc.v1 import prefetch_service_pb2 as proto
from tests.engines.engine import LOCAL, ROOT, free_port
from tests.engines.model import WIDE, Reference
from tests.engines.vllm_engine import BLOCK, VllmEngine
from tests.engines.vllm_pulling import address
from tests.support.waiting import wait_until

LENGTHS = (512, 2048, 4096)
LOST_LENGTH = 512
WAYS = ("kvgrpc", "p2p", "computed")


@dataclass
class Pair:
    """The engines and their p2p ports, and what is needed to start the holder again."""

    folder: Path
    reference: Reference
    registry: str
    environment: Mapping[str, str]
    data_plane: str = "shm"
    engines: dict[str, VllmEngine] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def start(self, name: str) -> None:
        port = free_port()
        tier = {"type": "KvGrpcTier", "module_path": "kvgrpc.engines.vllm.tier", "peers": True}
        pull = {"data_plane": self.data_plane, "pull": {"staging_pages": LONGEST // BLOCK}}
        p2p = {"type": "p2p", "host": LOCAL, "port": port}
        self.ports[name] = port
        self.engines[name] = vllm_engine(
            name,
            self.folder,
            self.reference.path,
            self.registry,
            tier,
            pull,
            p2p,
            environment=self.environment,
        )

    def restart_holder(self) -> None:
        before = address(self.registry, "holder")
        self.engines["holder"].close()
        self.start("holder")
        self.engines["holder"].wait_ready()
        wait_until(lambda: address(self.registry, "holder") != before, 60)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()

    def computed_by_holder(self, length: int) -> list[int]:
        """A prompt that lies in the holder's host memory."""
        prompt = prompt_of(self.reference, length)
        first_token(self.engines["holder"], prompt)
        with SyncClient(address(self.registry, "holder"), timeout=60) as client:
            pages = proto.PromptPages(tokens=prompt)
            wait_until(lambda: client.lookup(pages).host_pages == len(prompt) // BLOCK, 60)
        return prompt

    def ask(self, way: str, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and cached tokens as vLLM counts them."""
        source = {"kv_request_id": uuid.uuid4().hex, "remote_host": LOCAL, "remote_port": self.ports["holder"]}
        asked: dict[str, Any] = {"pull_from": ["holder"] if way == "kvgrpc" else []}
        if way == "p2p":
            asked["remote_kv_source"] = source
        seconds, request = first_token(self.engines["taker"], prompt, **asked)
        return seconds, request.cached


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nixl", required=True, help="where NIXL was installed")
    parser.add_argument("--ucx-tls", default="tcp", help='UCX_TLS; "": of UCX\'s own choice, shared memory')
    parser.add_argument("--data-plane", default="shm", help="of kvgrpc; mooncake: TCP, as p2p's default here")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--losses", type=int, default=2, help="stops and kills of the holder for each way")
    given = parser.parse_args(arguments)
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/engines/standins/vllm'}:{given.nixl}"}
    if given.ucx_tls:
        environment |= {"UCX_TLS": given.ucx_tls, "UCX_NET_DEVICES": "lo"}
    with tempfile.TemporaryDirectory() as name, opened(Path(name), environment, given.data_plane) as pair:
        print(f"UCX_TLS {given.ucx_tls or 'not set'}, {given.data_plane}, load {os.getloadavg()[0]:.0f}")
        measure_pulls(pair, given.lengths, given.rounds)
        measure_losses(pair, given.losses)
        print(f"load {os.getloadavg()[0]:.0f} at the end")


@contextlib.contextmanager
def opened(folder: Path, environment: Mapping[str, str], data_plane: str) -> Iterator[Pair]:
    registry = RegistryServer([f"{LOCAL}:0"]).open()
    pair = Pair(folder, Reference(folder, WIDE), registry.address, environment, data_plane)
    try:
        for name in ("holder", "taker"):
            pair.start(name)
        for engine in pair.engines.values():
            engine.wait_ready()
        yield pair
    finally:
        pair.close()
        registry.close()


def measure_pulls(pair: Pair, lengths: Sequence[int], rounds: int) -> None:
    for engine in pair.engines.values():
        first_token(engine, prompt_of(pair.reference, lengths[0]))  # kernels of that size are compiled
    for way in ("p2p", "kvgrpc"):
        took, from_cache = pair.ask(way, pair.computed_by_holder(lengths[0]))
        print(f"the first pull of the pair, {lengths[0]} tokens, {way}: {took * 1e3:.0f} ms, {from_cache} cached")
    print(f"| tokens | {' | '.join(WAYS)} | cached then |")
    print("|---:|---:|---:|---:|---|", flush=True)
    orders = list(itertools.permutations(WAYS))
    for length in lengths:
        first_token(pair.engines["taker"], prompt_of(pair.reference, length))
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        cached: dict[str, set[int]] = {way: set() for way in WAYS}
        for number in range(rounds):
            prompts = {
                way: prompt_of(pair.reference, length) if way == "computed" else pair.computed_by_holder(length)
                for way in WAYS
            }
            for way in orders[number % len(orders)]:
                took, from_cache = pair.ask(way, prompts[way])
                seconds[way].append(took)
                cached[way].add(from_cache)
        cells = " | ".join(f"{statistics.median(seconds[way]) * 1e3:.0f} ms" for way in WAYS)
        counted = ", ".join(f"{way} {' '.join(map(str, sorted(cached[way])))}" for way in WAYS)
        print(f"| {length} | {cells} | {counted} |", flush=True)


def measure_losses(pair: Pair, losses: int) -> None:
    """Of a holder that stops, and of one that is killed: both ways in turn, after a pull of each that went well."""
    print("| the holder | way | first token | computed then | cached |")
    print("|---|---|---:|---:|---:|", flush=True)
    turns = list(itertools.product(range(losses), ("stopped", "killed"), ("p2p", "kvgrpc")))
    for number, (_, how, way) in enumerate(turns, 1):
        wanted = pair.computed_by_holder(LOST_LENGTH)
        pair.ask(way, pair.computed_by_holder(LOST_LENGTH))
        holder = pair.engines["holder"]
        holder.stop() if how == "stopped" else holder.kill()
        seconds, cached = pair.ask(way, wanted)
        computed, _ = pair.ask("computed", prompt_of(pair.reference, LOST_LENGTH))
        print(f"| {how} | {way} | {seconds:.2f} s | {computed:.2f} s | {cached} |", flush=True)
        if how == "stopped":
            holder.go_on()
        elif number < len(turns):
            pair.restart_holder()


if __name__ == "__main__":
    main()
