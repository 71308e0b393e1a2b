"""First tokens of prompts that another real engine has computed, pulled and computed: ``python -m benchmarks.pulled``.

In the environment of ``make bench-engines`` whose engines they are to be: two of SGLang or of vLLM, without storage.
``--one-of-each``, in vLLM's: an SGLang and a vLLM, whose pages have as many tokens. They take turns as holder and
taker; the two ways of a round come in either order. The taker's own counter says how many tokens were cached. Its
answers are compared with the holder's; two kinds of engines may differ where two tokens are as likely.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.warm import ENGINE, LONGEST, SGLANG_SIZES, first_token, prompt_of, vllm_engine
from kvgrpc.client import SyncClient
from kvgrpc.server import RegistryServer
from kvgrpc.v1 import prefetch_service_pb2 as proto
from tests.engines.engine import LOCAL, PAGE, Engine
from tests.engines.model import WIDE, Reference
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.engines.vllm_engine import VllmEngine

LENGTHS = (128, 512, 1024, 2048, 4096, 8000)
ROUNDS = 4
NAMES = ("first", "second")


@dataclass(frozen=True)
class Both:
    """Two engines; ``lent(holder, prompt)`` waits until a prompt that one of them has computed can be lent. ``kinds``
    of them: figures of a kind of taker are put together."""

    engines: Sequence[Engine]
    kinds: Sequence[str]
    lent: Callable[[int, list[int]], None]


@dataclass
class Found:
    """Seconds to the first token, and how many tokens of pulled prompts the engine counted as cached."""

    pulled: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    cached: set[int] = field(default_factory=set)
    unlike: int = 0  # answers to pulled prompts that are not the holder's


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="a kind of taker, at each length")
    parser.add_argument("--one-of-each", action="store_true", help="an SGLang and a vLLM")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    given = parser.parse_args(arguments)
    registry = RegistryServer([f"{LOCAL}:0"]).open()
    try:
        with tempfile.TemporaryDirectory() as name:
            reference = Reference(Path(name), WIDE)
            opened = one_of_each if given.one_of_each else {"sglang": sglang, "vllm": vllm}[ENGINE]
            with opened(Path(name), reference, registry.address) as both:
                print(f"{' and '.join(both.kinds)}, load {os.getloadavg()[0]:.0f}")
                measure(both, reference, given.lengths, given.rounds)
                print(f"load {os.getloadavg()[0]:.0f} at the end")
    finally:
        registry.close()


@contextlib.contextmanager
def sglang(folder: Path, reference: Reference, registry: str) -> Iterator[Both]:
    from tests.engines.hierarchical import Hierarchical, known

    with contextlib.ExitStack() as opened:
        engines = []
        for name in NAMES:
            engines.append(sglang_engine(name, folder, reference, registry, Hierarchical, PAGE))
            opened.callback(engines[-1].close)
        for engine in engines:
            engine.wait_ready()
        wait_until(lambda: known(registry) == set(NAMES), 60)
        yield Both(engines, ("sglang",) * 2, lambda holder, prompt: written_through(engines[holder]))


@contextlib.contextmanager
def vllm(folder: Path, reference: Reference, registry: str) -> Iterator[Both]:
    from tests.engines.vllm_engine import BLOCK
    from tests.engines.vllm_pulling import address

    with contextlib.ExitStack() as opened:
        engines = []
        for name in NAMES:
            engines.append(pulling_vllm(name, folder, reference, registry))
            opened.callback(engines[-1].close)
        for engine in engines:
            engine.wait_ready()
        clients = [opened.enter_context(SyncClient(address(registry, name), timeout=60)) for name in NAMES]

        def lent(holder: int, prompt: list[int]) -> None:
            pages = proto.PromptPages(tokens=prompt)
            wait_until(lambda: clients[1 - holder].lookup(pages).storage_pages == len(prompt) // BLOCK, 60)

        yield Both(engines, ("vllm",) * 2, lent)


@contextlib.contextmanager
def one_of_each(folder: Path, reference: Reference, registry: str) -> Iterator[Both]:
    from tests.engines.engine import Sglang
    from tests.engines.kinds import wait_ready
    from tests.engines.vllm_engine import BLOCK
    from tests.engines.vllm_pulling import address

    with contextlib.ExitStack() as opened:
        first = sglang_engine("sglang", folder, reference, registry, Sglang, BLOCK)
        opened.callback(first.close)
        second = pulling_vllm("vllm", folder, reference, registry)
        opened.callback(second.close)
        wait_ready(first, second, registry)
        client = opened.enter_context(SyncClient(address(registry, "vllm"), timeout=60))

        def lent(holder: int, prompt: list[int]) -> None:
            if holder == 0:
                written_through(first)
            else:
                pages = proto.PromptPages(tokens=prompt)
                wait_until(lambda: client.lookup(pages).host_pages == len(prompt) // BLOCK, 60)

        yield Both((first, second), ("sglang", "vllm"), lent)


def sglang_engine(
    name: str, folder: Path, reference: Reference, registry: str, engine: type[Engine], page: int
) -> Engine:
    from tests.engines.hierarchical import started

    names = {
        "KVGRPC_CACHE_LISTEN": f"{LOCAL}:0",
        "KVGRPC_DATA_PLANE": "shm",
        "KVGRPC_ENGINE": name,
        "KVGRPC_REGISTRY": registry,
    }
    pull = {"exported_pages": 2 * LONGEST // page, "staging_pages": LONGEST // page}
    sizes = {**SGLANG_SIZES, "page_size": page}
    return started(folder, reference, engine=engine, environment=names, sizes=sizes, pull=pull)


def written_through(engine: Engine) -> None:
    """SGLang empties its cache once its backups are over; what is lent stays."""
    assert engine.is_empty(60)


def pulling_vllm(name: str, folder: Path, reference: Reference, registry: str) -> VllmEngine:
    from tests.engines.vllm_engine import BLOCK

    tier = {"type": "KvGrpcTier", "module_path": "kvgrpc.engines.vllm.tier", "peers": True}
    pull = {"data_plane": "shm", "pull": {"staging_pages": LONGEST // BLOCK, "answer_timeout": 5.0}}
    return vllm_engine(name, folder, reference.path, registry, tier, pull)


def measure(both: Both, reference: Reference, lengths: Sequence[int], rounds: int) -> None:
    print("| taker | tokens | pulled | computed again | cached then | answers unlike |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    for length in lengths:
        for engine in both.engines:
            first_token(engine, prompt_of(reference, length))  # kernels of that size are compiled
        found = {kind: Found() for kind in both.kinds}
        for number in range(rounds * len(found)):
            holder, taker = number % 2, 1 - number % 2
            prompt, other = prompt_of(reference, length), prompt_of(reference, length)
            _, before = first_token(both.engines[holder], prompt)
            both.lent(holder, prompt)
            of_taker = found[both.kinds[taker]]
            for asked in (prompt, other) if number // 2 % 2 else (other, prompt):
                seconds, request = first_token(both.engines[taker], asked)
                (of_taker.pulled if asked is prompt else of_taker.computed).append(seconds)
                if asked is prompt:
                    of_taker.unlike += request.tokens != before.tokens
                    of_taker.cached.add(request.cached)
        for kind, its in found.items():
            cells = [f"{statistics.median(each) * 1e3:.0f} ms" for each in (its.pulled, its.computed)]
            cached = " ".join(map(str, sorted(its.cached)))
            print(f"| {kind} | {length} | {' | '.join(cells)} | {cached} | {its.unlike} |", flush=True)


if __name__ == "__main__":
    main()
