"""pull.ttft.*: the first token of a prompt whose pages another engine has, beside computing the prompt again.

Both sides are the demo's engine on one thread: the same tokens come of it, or the turn fails.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric
from benchmarks.harness.worker import Desk, Worker

TTFT = "pull.ttft"
SECONDS = 120.0
ENGINE, RANK, TIERS, SERVER = "engine", "rank", "tiers", "registry"


def benchmarks(plan: Plan) -> list[Benchmark]:
    missing = "" if find_spec("torch") else "torch cannot be imported"
    return [
        Benchmark(
            metrics=(Metric(f"{TTFT}.{tokens}", "ms", "lower", "computed again"),),
            ours=partial(Pulled, tokens),
            baseline=partial(Computed, tokens),
            missing=missing,
        )
        for tokens in plan.pull_tokens
    ]


class Pulled:
    """A holder that has computed the prompt, and a taker that has nothing of it; over shared memory."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._registry, self._holder, self._taker = Worker("ttft-registry"), Worker("ttft-holder"), Worker("ttft-taker")
        registry = self._registry.call(_serve)
        for worker, engine in ((self._holder, "holder"), (self._taker, "taker")):
            worker.call(_open, engine, registry)
        self._token = self._holder.call(_lend, tokens)
        self._taker.call(_until_known)

    def turn(self) -> Figures:
        seconds, token = self._taker.call(_pull, self._tokens)
        assert token == self._token, "the pages of another engine gave another token"
        return {f"{TTFT}.{self._tokens}": seconds * 1e3}

    def peak_rss(self) -> int:
        return self._holder.peak_rss() + self._taker.peak_rss()

    def close(self) -> None:
        for worker in (self._taker, self._holder):
            worker.call(_close)
        for worker in (self._taker, self._holder, self._registry):
            worker.close()


class Computed:
    """One engine that computes all of it each time."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._worker = Worker("ttft-computed")
        self._worker.call(_open_alone)

    def turn(self) -> Figures:
        return {f"{TTFT}.{self._tokens}": self._worker.call(_compute, self._tokens) * 1e3}

    def peak_rss(self) -> int:
        return self._worker.peak_rss()

    def close(self) -> None:
        self._worker.close()


def _prompt(tokens: int) -> list[int]:
    return [(7 * number) % 1021 + 1 for number in range(tokens)]


def _serve(desk: Desk) -> str:
    from kvgrpc.server import RegistryServer

    desk.items[SERVER] = server = RegistryServer(["127.0.0.1:0"]).open()
    return server.address


def _open_alone(desk: Desk) -> None:
    _make_engine(desk)


def _make_engine(desk: Desk) -> Any:
    """Its data plane, which is the engine's memory too."""
    from kvgrpc.dataplane import open_plane
    from kvgrpc.demo.engine.config import DECODE
    from kvgrpc.demo.engine.engine import DemoEngine

    plane = open_plane("shm")
    desk.items[ENGINE] = DemoEngine(DECODE, plane)
    return plane


def _open(desk: Desk, name: str, registry: str) -> None:
    from kvgrpc.demo.engine.config import DECODE
    from kvgrpc.demo.engine.tiers import Tiers, config_of
    from kvgrpc.demo.protocol import Open
    from kvgrpc.model import Role
    from kvgrpc.pull.model import PullConfig
    from kvgrpc.server import RankConfig, open_rank

    plane = _make_engine(desk)
    engine = desk.items[ENGINE]
    prefetch = config_of(DECODE, engine, Open("shm", registry, pulls=True))
    rank = open_rank(
        RankConfig(
            engine=name,
            role=Role.DECODE,
            pools=(engine.memory.pool,),
            data_plane=plane,
            registry=registry,
            prefetch=replace(prefetch, limits=replace(prefetch.limits, storage_timeout=SECONDS)),
            pull=PullConfig(),
        )
    )
    assert rank.prefetch is not None
    desk.items[RANK], desk.items[TIERS] = rank, Tiers(engine, rank.prefetch)


def _lend(desk: Desk, tokens: int) -> int:
    """The prompt is computed, and its pages wait on the host; its first token."""
    engine, prefetch = desk.items[ENGINE], desk.items[RANK].prefetch
    token = _first_token(engine, tokens, keep=True)
    pages = engine.cache.match(_prompt(tokens))
    host = prefetch.copies.write(pages)
    assert prefetch.copies.wait_idle(SECONDS)
    prefetch.controller.keeper.keep(_hashes(tokens), 0, host, "")
    return token


def _hashes(tokens: int) -> tuple[str, ...]:
    from kvgrpc.demo.engine.config import DECODE
    from kvgrpc.hashing import page_hashes

    whole = tokens // DECODE.page_tokens * DECODE.page_tokens
    return tuple(each.hex() for each in page_hashes(_prompt(whole), DECODE.page_tokens))


def _until_known(desk: Desk) -> None:
    holders, end = desk.items[RANK]._parts.cache_peer._holders, time.monotonic() + 20.0
    while not holders.candidates():
        assert time.monotonic() < end, "the taker does not know the holder"
        time.sleep(0.01)  # until the registry's word has come


def _pull(desk: Desk, tokens: int) -> tuple[float, int]:
    """From the order to the first token."""
    from kvgrpc.demo.protocol import Resume
    from kvgrpc.prefetch.model import OperationKind
    from kvgrpc.prefetch.protocol.order import Order

    manager, hashes = desk.items[RANK].prefetch, _hashes(tokens)
    began = time.perf_counter()
    operation = manager.start(Order(kind=OperationKind.PREFETCH, hashes=hashes))
    assert operation.wait(SECONDS)
    resumed = desk.items[TIERS].resume(Resume(_prompt(tokens), 1))
    seconds = time.perf_counter() - began
    assert resumed.loaded_pages == len(hashes), f"{resumed.loaded_pages} of {len(hashes)} pages came"
    desk.items[ENGINE].cache.clear()
    return seconds, resumed.tokens[0]


def _compute(desk: Desk, tokens: int) -> float:
    began = time.perf_counter()
    _first_token(desk.items[ENGINE], tokens, keep=False)
    return time.perf_counter() - began


def _first_token(engine: Any, tokens: int, *, keep: bool) -> int:
    run = engine.admit_to_compute(_prompt(tokens))
    while not run.prompt_computed:
        token = engine.compute_chunk(run)
    if keep:
        engine.keep(run)
    engine.release(run)
    return int(token)


def _close(desk: Desk) -> None:
    desk.items[RANK].close(5.0)
