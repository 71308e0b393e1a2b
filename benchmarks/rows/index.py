"""index.*: who holds the beginning of a request, asked of one process over gRPC, beside the same maps in one's own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import msgspec
import psutil

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Worker
from benchmarks.rows.control import percentile
from kvgrpc.events.codec import decode_batch
from kvgrpc.events.following.follower import FollowerCore
from kvgrpc.events.following.index_servicer import IndexServicer
from kvgrpc.events.following.messages import Mode
from kvgrpc.events.following.planning import Placement, Planner, PlanQuestion
from kvgrpc.events.following.sources import (
    NO_LABELS,
    CacheScore,
    LabelSet,
    Question,
    SourcesPage,
    SourceTable,
    Wanted,
)
from kvgrpc.events.log.digest import mix
from kvgrpc.model import EngineLoad
from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.options import SERVER_OPTIONS
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1.index_service_pb2_grpc import IndexServiceStub, add_IndexServiceServicer_to_server

SCORE, MEMORY, APPLY, PLAN = "index.score", "index.memory", "index.apply", "index.plan"
DIRECT, BEST, BATCH = f"{SCORE}.direct", f"{SCORE}.best8", f"{SCORE}.batch16"
BATCH_PROMPTS = 16
# Half of what the server is to answer in a second, asked at even distances: 500 single prompts, 1,000 in batches.
PACED = {SCORE: 250, BATCH: 500}
BASELINE = "a dict for each engine"
ENGINES = 64
REQUEST_BLOCKS = 512
# A prompt that all share, a conversation that some have seen, one that few have whole.
HELD = [(4, REQUEST_BLOCKS), (16, 256), (ENGINES, 64)]
TABLE, MAPS = "table", "maps"

Fill = Callable[[Desk, int], int]
Ask = Callable[[Desk, int], list[float]]


def benchmarks(plan: Plan) -> list[Benchmark]:
    blocks, queries = plan.index_blocks, plan.index_queries
    return [
        Benchmark(
            metrics=(
                Metric(SCORE, "queries/s", "higher", BASELINE, Target(ratio=0.5)),
                Metric(f"{SCORE}.p50", "us", "lower", BASELINE),
                Metric(f"{SCORE}.p99_paced", "us", "lower", BASELINE),
            ),
            ours=lambda: OverGrpc(blocks, queries, SCORE, most=0),
            baseline=lambda: InProcess(_fill_maps, _ask_maps, blocks, queries, SCORE),
        ),
        Benchmark(
            metrics=(Metric(BEST, "queries/s", "higher", BASELINE), Metric(f"{BEST}.p50", "us", "lower", BASELINE)),
            ours=lambda: OverGrpc(blocks, queries, BEST, most=8),
            baseline=lambda: InProcess(_fill_maps, _ask_maps, blocks, queries, BEST),
        ),
        Benchmark(
            metrics=(
                Metric(BATCH, "queries/s", "higher", BASELINE),
                Metric(f"{BATCH}.p50", "us", "lower", BASELINE),
                Metric(f"{BATCH}.p99_paced", "us", "lower", BASELINE),
            ),
            ours=lambda: OverGrpc(blocks, queries, BATCH, most=0, batch=BATCH_PROMPTS),
            baseline=lambda: InProcess(_fill_maps, _ask_maps, blocks, queries, BATCH),
        ),
        Benchmark(
            metrics=(Metric(APPLY, "batches/s", "higher", BASELINE),),
            ours=lambda: Applying(_apply_to_table, plan.index_batches),
            baseline=lambda: Applying(_apply_to_maps, plan.index_batches),
        ),
        Benchmark(
            metrics=(Metric(DIRECT, "queries/s", "higher", BASELINE), Metric(f"{DIRECT}.p50", "us", "lower", BASELINE)),
            ours=lambda: InProcess(_fill_table, _ask_table, blocks, queries, DIRECT),
            baseline=lambda: InProcess(_fill_maps, _ask_maps, blocks, queries, DIRECT),
        ),
        Benchmark(
            metrics=(Metric(PLAN, "plans/s", "higher", BASELINE), Metric(f"{PLAN}.p50", "us", "lower", BASELINE)),
            ours=lambda: InProcess(_fill_hosts, _ask_planner, blocks, queries, PLAN),
            baseline=lambda: InProcess(_fill_maps, _ask_maps, blocks, queries, PLAN),
        ),
        Benchmark(
            metrics=(Metric(MEMORY, "B/block", "lower", BASELINE),),
            ours=lambda: Memory(_fill_table, blocks),
            baseline=lambda: Memory(_fill_maps, blocks),
            warm_ups=0,
        ),
    ]


class InProcess:
    """Filled once, asked in turns."""

    def __init__(self, fill: Fill, ask: Ask, blocks: int, queries: int, name: str) -> None:
        self._worker = Worker(f"{name}-direct")
        self._ask, self._queries, self._name = ask, queries, name
        self._worker.call(fill, blocks)

    def turn(self) -> Figures:
        return figures(self._worker.call(self._ask, self._queries), self._name)

    def peak_rss(self) -> int:
        return self._worker.peak_rss()

    def close(self) -> None:
        self._worker.close()


class OverGrpc:
    """The service in one process, a router in another that asks one question after the other."""

    def __init__(self, blocks: int, queries: int, name: str, most: int, batch: int = 1) -> None:
        self._server, self._router = Worker("index-server"), Worker("index-router")
        self._queries, self._name, self._most, self._batch = queries, name, most, batch
        self._server.call(_fill_table, blocks)
        self._router.call(_dial, self._server.call(_serve))

    def turn(self) -> Figures:
        calls = self._queries // self._batch or 1
        took = self._router.call(_ask_service, calls, self._most, self._batch, 0.0)
        found = {self._name: calls * self._batch / sum(took), f"{self._name}.p50": percentile(took, 50) * 1e6}
        if self._name in PACED:
            every = self._batch / PACED[self._name]
            took = self._router.call(_ask_service, calls, self._most, self._batch, every)
            found[f"{self._name}.p99_paced"] = percentile(took, 99) * 1e6
        return found

    def peak_rss(self) -> int:
        return self._server.peak_rss() + self._router.peak_rss()

    def close(self) -> None:
        self._router.close()
        self._server.close()


class Applying:
    """Batches of events of all engines in turn, decoded and folded."""

    def __init__(self, apply: Callable[[Desk, int], float], batches: int) -> None:
        self._worker = Worker("index-apply")
        self._apply, self._batches = apply, batches

    def turn(self) -> Figures:
        return {APPLY: self._batches / self._worker.call(self._apply, self._batches)}

    def peak_rss(self) -> int:
        return self._worker.peak_rss()

    def close(self) -> None:
        self._worker.close()


@dataclass
class Memory:
    """By how much a process grows for each block of an engine, in a fresh process each turn."""

    fill: Fill
    blocks: int
    highest: int = 0

    def turn(self) -> Figures:
        worker = Worker("index-memory")
        try:
            grown = worker.call(self.fill, self.blocks)
            self.highest = max(self.highest, worker.peak_rss())
        finally:
            worker.close()
        return {MEMORY: grown / self.blocks}

    def peak_rss(self) -> int:
        return self.highest

    def close(self) -> None: ...


def figures(took: list[float], name: str) -> Figures:
    found = {name: len(took) / sum(took), f"{name}.p50": percentile(took, 50) * 1e6}
    return found | ({f"{name}.p99_paced": percentile(took, 99) * 1e6} if name in PACED else {})


def request() -> list[int]:
    return [mix(number) for number in range(REQUEST_BLOCKS)]


def contents(engine: int, blocks: int) -> list[int]:
    """So many blocks: what it has of the request, the rest its own."""
    held = next(count for below, count in HELD if engine < below)
    rng = random.Random(engine)
    return request()[:held] + [rng.getrandbits(64) for _ in range(max(0, blocks // ENGINES - held))]


def expected() -> dict[str, int]:
    return {f"engine{engine}": next(count for below, count in HELD if engine < below) for engine in range(ENGINES)}


def _fill_table(desk: Desk, blocks: int) -> int:
    before, table = _resident(), SourceTable()
    desk.items[TABLE] = table
    for engine in range(ENGINES):
        core = FollowerCore(table.index, lambda payload: [])
        core.start()
        core.begun(1, "log", 0, 0, 0.0)
        core.snapshot(1, 0, 0, [], 0.0)
        core.snapshot_complete(1, None, 0.0)
        assert core.contents is not None and core.take_commands()[0].mode is Mode.SNAPSHOT  # type: ignore[union-attr]
        core.contents.blocks.stored("GPU", contents(engine, blocks))
        table.add(f"engine{engine}", 0, core, "", live=False)
    return _resident() - before


def _fill_hosts(desk: Desk, blocks: int) -> int:
    """The same blocks on hosts, of engines that say what they have to do."""
    before, table = _resident(), SourceTable()
    desk.items[TABLE] = table
    load = EngineLoad(prefill_tokens_per_second=8_000.0, page_tokens=16, page_bytes=2**21)
    for engine in range(ENGINES):
        core = FollowerCore(table.index, lambda payload: [])
        core.start()
        core.begun(1, "log", 0, 0, 0.0)
        core.snapshot(1, 0, 0, [], 0.0)
        core.snapshot_complete(1, None, 0.0)
        core.told_load(1, replace(load, waiting_tokens=1_000 * engine))
        assert core.contents is not None
        core.contents.blocks.stored("CPU_PINNED", contents(engine, blocks))
        table.add(f"engine{engine}", 0, core, "", live=False)
    return _resident() - before


def _fill_maps(desk: Desk, blocks: int) -> int:
    before = _resident()
    desk.items[MAPS] = {f"engine{engine}": dict.fromkeys(contents(engine, blocks), 1) for engine in range(ENGINES)}
    return _resident() - before


def event_batches(count: int) -> list[bytes]:
    """One request's 8 blocks stored, and as many of an earlier one removed, a batch."""
    encode, rng = msgspec.msgpack.Encoder().encode, random.Random(1)
    stored = [[rng.getrandbits(64) for _ in range(8)] for _ in range(count)]
    gone = [[], *stored]
    return [
        encode([1.0, [["BlockRemoved", gone[at], "GPU"], ["BlockStored", new, None, [7] * 128, 16, None, "GPU"]], 0])
        for at, new in enumerate(stored)
    ]


def _apply_to_table(desk: Desk, batches: int) -> float:
    payloads, table = event_batches(batches), SourceTable()
    cores = [FollowerCore(table.index, lambda payload: decode_batch(payload).events) for _ in range(ENGINES)]
    for core in cores:
        core.start()
        core.begun(1, "log", 0, 0, 0.0)
        core.snapshot(1, 0, 0, [], 0.0)
        core.snapshot_complete(1, None, 0.0)
    begin = time.perf_counter()
    for at, payload in enumerate(payloads):
        cores[at % ENGINES].batches(1, at // ENGINES, [payload], 0.0)
    return time.perf_counter() - begin


def _apply_to_maps(desk: Desk, batches: int) -> float:
    payloads = event_batches(batches)
    maps: list[dict[int, int]] = [{} for _ in range(ENGINES)]
    begin = time.perf_counter()
    for at, payload in enumerate(payloads):
        blocks = maps[at % ENGINES]
        for event in msgspec.msgpack.decode(payload)[1]:
            if event[0] == "BlockStored":
                blocks.update(dict.fromkeys(event[1], 1))
            else:
                for block in event[1]:
                    blocks.pop(block, None)
    return time.perf_counter() - begin


def _ask_table(desk: Desk, queries: int) -> list[float]:
    table, asked, took = desk.items[TABLE], request(), []
    for _ in range(queries):
        begin = time.perf_counter()
        scores = table.score(Question({0: asked}), Wanted(), 0.0)
        took.append(time.perf_counter() - begin)
        _check({score.engine: score.blocks for score in scores})
    return took


def _ask_planner(desk: Desk, queries: int) -> list[float]:
    """Where to run it, of all engines, and from whom to pull."""
    planner, asked, took = Planner(desk.items[TABLE]), PlanQuestion(Question({0: request()})), []
    for _ in range(queries):
        begin = time.perf_counter()
        ((best, *others),) = planner.plan([asked], 0.0, wanted=Wanted())
        took.append(time.perf_counter() - begin)
        assert len(others) == ENGINES - 1 and best.first_token is not None
    return took


def _ask_maps(desk: Desk, queries: int) -> list[float]:
    maps, asked, took = desk.items[MAPS], request(), []
    for _ in range(queries):
        begin = time.perf_counter()
        found = {}
        for engine, blocks in maps.items():
            leading = 0
            for block in asked:
                if block not in blocks:
                    break
                leading += 1
            if leading:
                found[engine] = leading
        took.append(time.perf_counter() - begin)
        _check(found)
    return took


class _Table:
    """What the servicer asks."""

    def __init__(self, table: SourceTable) -> None:
        self._table = table

    def ask(self, question: Question, wanted: Wanted) -> list[CacheScore]:
        return self._table.score(question, wanted, 0.0)

    def page_sizes(
        self, wanted: Wanted, model: str = "", field: str = "model", labels: LabelSet = NO_LABELS
    ) -> set[int]:
        return self._table.page_sizes(wanted, model, field, labels)

    def plan_in_steps(
        self, questions: Sequence[PlanQuestion], wanted: Wanted, *, reserve: bool = False
    ) -> Generator[list[Placement] | None, None, None]:
        return Planner(self._table).in_steps(questions, 0.0, wanted=wanted, reserve=reserve)

    def not_followed(self) -> list[str]:
        return []

    def page_in_steps(self, page: SourcesPage, **more: Any) -> Iterator[None]:
        return self._table.page_in_steps(page, lambda: 0.0, **more)


def _serve(desk: Desk) -> str:
    async def serve() -> str:
        server = desk.items["server"] = grpc.aio.server(
            interceptors=interceptors_of(ServerSecurity()), options=SERVER_OPTIONS
        )
        add_IndexServiceServicer_to_server(IndexServicer(_Table(desk.items[TABLE])), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return f"127.0.0.1:{port}"

    return LoopThread.shared().run(serve(), 30)


def _dial(desk: Desk, address: str) -> None:
    desk.items["stub"] = IndexServiceStub(grpc.insecure_channel(address))


def _ask_service(desk: Desk, calls: int, most: int, batch: int, every: float) -> list[float]:
    """How long each call took; with ``every``, from the moment at which it was due."""
    stub, asked, took = desk.items["stub"], request(), []
    best = dict(sorted(expected().items(), key=lambda one: (-one[1], one[0]))[: most or None])
    due = time.perf_counter()
    for _ in range(calls):
        due = due + every if every else time.perf_counter()
        time.sleep(max(0.0, due - time.perf_counter()))
        prompt = pb.ScorePrompt(block_hashes=pb.BlockHashes(values=asked))
        question = pb.ScoreRequest(prompts=[prompt] * batch, max_scores=most)
        response = stub.Score(question, timeout=30)
        took.append(time.perf_counter() - due)
        _check({score.engine: score.blocks for score in response.prompts[-1].scores}, best)
    return took


def _check(found: dict[str, int], right: dict[str, int] | None = None) -> None:
    if found != (right or expected()):
        raise AssertionError("an engine was scored wrong")


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)
