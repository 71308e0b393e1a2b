"""First tokens of prompts that another real engine has computed, pulled and computed: ``python -m benchmarks.pulled``.

In the environment of ``make bench-engines`` whose engines they are to be: two of SGLang or of vLLM, without storage.
They take turns as holder and taker; the two ways of a round come in either order. The taker's own counter says how many
tokens were cached; its tokens are compared with the holder's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.warm import ENGINE, LONGEST, SGLANG_SIZES, first_token, prompt_of, vllm_engine
from kvgrpc.client import SyncClient
from kvgrpc.server import RegistryServer
from kvgrpc.v1 import prefetch_service_pb2 as proto
from tests.engines.engine import LOCAL, PAGE, Engine
from tests.engines.model import WIDE, Reference
from tests.support.waiting import wait_until

LENGTHS = (128, 512, 1024, 2048, 4096, 8000)
ROUNDS = 4
NAMES = ("first", "second")


@dataclass(frozen=True)
class Both:
    """Two engines; ``lent(holder, prompt)`` waits until a prompt that one of them has computed can be lent."""

    engines: Sequence[Engine]
    lent: Callable[[int, list[int]], None]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    given = parser.parse_args(arguments)
    registry = RegistryServer([f"{LOCAL}:0"]).open()
    try:
        with tempfile.TemporaryDirectory() as name:
            reference = Reference(Path(name), WIDE)
            with {"sglang": sglang, "vllm": vllm}[ENGINE](Path(name), reference, registry.address) as both:
                print(f"{ENGINE}, load {os.getloadavg()[0]:.0f}")
                measure(both, reference, given.lengths, given.rounds)
                print(f"load {os.getloadavg()[0]:.0f} at the end")
    finally:
        registry.close()


@contextlib.contextmanager
def sglang(folder: Path, reference: Reference, registry: str) -> Iterator[Both]:
    from tests.engines.hierarchical import known, started

    pull = {"exported_pages": 2 * LONGEST // PAGE, "staging_pages": LONGEST // PAGE}
    with contextlib.ExitStack() as opened:
        engines = []
        for name in NAMES:
            names = {
                "KVGRPC_CACHE_LISTEN": f"{LOCAL}:0",
                "KVGRPC_DATA_PLANE": "shm",
                "KVGRPC_ENGINE": name,
                "KVGRPC_REGISTRY": registry,
            }
            engines.append(started(folder, reference, environment=names, sizes=SGLANG_SIZES, pull=pull))
            opened.callback(engines[-1].close)
        for engine in engines:
            engine.wait_ready()
        wait_until(lambda: known(registry) == set(NAMES), 60)

        def lent(holder: int, prompt: list[int]) -> None:
            """SGLang empties its cache once its backups are over."""
            assert engines[holder].is_empty(60)

        yield Both(engines, lent)


@contextlib.contextmanager
def vllm(folder: Path, reference: Reference, registry: str) -> Iterator[Both]:
    from tests.engines.vllm_engine import BLOCK
    from tests.engines.vllm_pulling import address

    tier = {"type": "KvGrpcTier", "module_path": "kvgrpc.engines.vllm.tier", "peers": True}
    pull = {"data_plane": "shm", "pull": {"staging_pages": LONGEST // BLOCK, "answer_timeout": 5.0}}
    with contextlib.ExitStack() as opened:
        engines = []
        for name in NAMES:
            engines.append(vllm_engine(name, folder, reference.path, registry, tier, pull))
            opened.callback(engines[-1].close)
        for engine in engines:
            engine.wait_ready()
        clients = [opened.enter_context(SyncClient(address(registry, name), timeout=60)) for name in NAMES]

        def lent(holder: int, prompt: list[int]) -> None:
            pages = proto.PromptPages(tokens=prompt)
            wait_until(lambda: clients[1 - holder].lookup(pages).storage_pages == len(prompt) // BLOCK, 60)

        yield Both(engines, lent)


def measure(both: Both, reference: Reference, lengths: Sequence[int], rounds: int) -> None:
    print("| tokens | pulled | computed again | cached then |")
    print("|---:|---:|---:|---:|", flush=True)
    for length in lengths:
        for engine in both.engines:
            first_token(engine, prompt_of(reference, length))  # kernels of that size are compiled
        pulled, computed, cached = list[float](), list[float](), set[int]()
        for number in range(rounds):
            holder, taker = both.engines[number % 2], both.engines[1 - number % 2]
            prompt, other = prompt_of(reference, length), prompt_of(reference, length)
            _, before = first_token(holder, prompt)
            both.lent(number % 2, prompt)
            for asked in (prompt, other) if number // 2 % 2 else (other, prompt):
                seconds, request = first_token(taker, asked)
                (pulled if asked is prompt else computed).append(seconds)
                if asked is prompt:
                    assert request.tokens == before.tokens, (request.tokens, before.tokens)
                    cached.add(request.cached)
        cells = [f"{statistics.median(each) * 1e3:.0f} ms" for each in (pulled, computed)]
        print(f"| {length} | {' | '.join(cells)} | {' '.join(map(str, sorted(cached)))} |", flush=True)


if __name__ == "__main__":
    main()
