"""engine.*: real engines over kvgrpc, and over the engine's own Mooncake backend: ``make bench-engines``.

``python -m benchmarks.engines [--only engine.sglang.ttft] [--rounds N] [--json PATH]``, in an environment of
tests/engines, whose engines these are: SGLang's or vLLM's. Both pairs take turns. Schedulers poll without a pause, so
the pair whose turn it is not is stopped (SIGSTOP), and the first requests after that do not count. One pair of engines
is a tenth faster or slower than the next of the same kind, for as long as it lives: rows of a latency, and decode's,
start them several times.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import threads
from benchmarks.harness.quiet import adopt_orphans, run_quietly
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Problem, Row, Target, markdown, show, store
from benchmarks.harness.windows import Window, cpu_beside, kept
from benchmarks.harness.worker import peak_rss
from benchmarks.sides.ready_pages import FED
from tests.engines.engine import Pair, Request
from tests.engines.model import LONG, TINY, WIDE, Case, Reference, Size
from tests.engines.vllm_engine import BLOCK, CONNECTOR, IN_TREE_CONNECTOR, VllmPair
from tests.support.waiting import wait_until

ENGINE = "sglang" if find_spec("sglang") else "vllm"
RESULTS = Path(__file__).parent / f"results-engines-{ENGINE}.json"
LOG_WIDTH = 170
IN_TREE = {"sglang": "SGLang's Mooncake", "vllm": "vLLM's Mooncake"}[ENGINE]
# No claim about kvgrpc, but the most that ttft could reach: a socket and nothing else (baselines/sglang_bare.py), or a
# bare stream of gRPC and bare writes of Mooncake (baselines/sglang_stream.py).
LIMITS = {"bare": "limit.sglang.ttft", "stream": "limit.sglang.stream"}
PAIRS = {"sglang": Pair, "vllm": VllmPair}
TTFT, WIDE_TTFT = f"engine.{ENGINE}.ttft", f"engine.{ENGINE}.wide"
# Times as fast as in-tree: p50, p99.
TTFT_RATIOS = {"sglang": (1.1, 1.5), "vllm": (1.0, 1.0)}[ENGINE]
DETECT, FIRST_REQUEST = f"engine.{ENGINE}.detect", f"engine.{ENGINE}.first_request"
CROWDED = f"engine.{ENGINE}.wide.concurrent32"
DECODE_KEEPS = f"engine.{ENGINE}.decode_keeps"
PROMPT_TOKENS, NEW_TOKENS = 100, 4
# The tests look whether a page is in two rooms at once; nobody else does.
AS_SHIPPED = {"KVGRPC_CHECK_PAGES": "0"}
TIMED_REQUESTS, UNCOUNTED_REQUESTS = 100, 4
STARTS = 3
# How much one pair differs from the next is most of what the row of the crowd shows, so it starts more of them.
CROWD_STARTS = 2
# A row takes minutes, so one that others disturbed is measured again once.
TRIES = 2
WIDE_PROMPT_TOKENS, WIDE_REQUESTS, WIDE_CONCURRENCY = 128, 12, 4
CROWD = 32


@dataclass(frozen=True)
class LongPrompts:
    """So many of so many tokens a turn. SGLang's attention for CPUs computes all earlier tokens anew in each chunk."""

    tokens: int
    chunk: int
    requests: int
    warm_ups: int = 1


LONG_PROMPTS = {
    f"engine.{ENGINE}.long": LongPrompts(8_000, chunk=1_024, requests=3),
    f"engine.{ENGINE}.long16k": LongPrompts(16_000, chunk=2_048, requests=2),
    f"engine.{ENGINE}.long32k": LongPrompts(32_000, chunk=8_192, requests=1),
    # Minutes each, beside which what a first request costs is nothing.
    f"engine.{ENGINE}.long64k": LongPrompts(64_000, chunk=8_192, requests=1, warm_ups=0),
}
# Of decode's row: what it generates all the time, and what arrives beside it, a page each.
BATCH, BATCH_TOKENS, ARRIVING_TOKENS = 8, 2_000, 16
# A window with hand-offs stands between two without, as often as this in a turn; 50 arrive a second.
WINDOWS, WINDOW_SECONDS, ARRIVALS = 4, 1.0, 50
# How long a request is waited for whose prefill is dead; one that waits on is counted with it.
DETECT_SECONDS = {"sglang": 60.0, "vllm": 30.0}[ENGINE]


def both(**sglang: Any) -> Mapping[str, Any]:
    """Arguments of either engine, by SGLang's names."""
    names = {
        "chunked_prefill_size": "max_num_batched_tokens",
        "max_running_requests": "max_num_seqs",
        "context_length": "max_model_len",
    }
    if ENGINE == "sglang":
        return sglang
    blocks = sglang.pop("max_total_tokens", 4096) // BLOCK + 1
    return {"num_gpu_blocks_override": blocks, **{names[name]: value for name, value in sglang.items()}}


CROWDED_ENGINES = both(max_running_requests=CROWD, max_total_tokens=CROWD * 2 * WIDE_PROMPT_TOKENS)
BUSY_ENGINES = both(
    max_running_requests=2 * BATCH, context_length=2 * BATCH_TOKENS, max_total_tokens=3 * BATCH * BATCH_TOKENS
)


class Engines:
    """One side: a pair of engines, stopped except in its turns. Subclasses do the work of a turn."""

    size: Size = TINY
    prompt_tokens = PROMPT_TOKENS
    request_seconds = 60.0
    cases = 24
    at_both: Mapping[str, Any] = both()
    pairs: Mapping[str, Any] = PAIRS

    def __init__(self, backend: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvgrpc-bench-"))
        reference = Reference(self._folder, self.size)
        self._cases = endless([reference.case(self.prompt_tokens, NEW_TOKENS) for _ in range(self.cases)])
        start = {"sglang": sglang_pair, "vllm": vllm_pair}[ENGINE]
        self.pair: Pair = start(self.pairs[ENGINE], self._folder, reference.path, backend, self.at_both)
        self.pair.wait_ready()
        self._stop()

    def turn(self) -> Figures:
        for engine in (self.pair.prefill, self.pair.decode):
            engine.go_on()
        try:
            return self.work()
        finally:
            self._stop()

    def work(self) -> Figures:
        raise NotImplementedError

    def peak_rss(self) -> int:
        return sum(peak_rss(pid) for engine in (self.pair.prefill, self.pair.decode) for pid in engine.pids())

    def close(self) -> None:
        self.pair.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def submit(self) -> tuple[Case, Request, Request]:
        case = next(self._cases)
        return (case, *self.pair.submit(case.prompt, NEW_TOKENS))

    def finish(self, case: Case, prefill: Request, decode: Request) -> float:
        """Milliseconds from sending the request to the first token at decode. Raises for a wrong token."""
        decoded, prefilled = decode.result(self.request_seconds), prefill.result(self.request_seconds)
        if decoded != case.tokens or prefilled != case.tokens[:1]:
            raise RuntimeError(f"wrong tokens: {decode.tokens} for {case.tokens}")
        return ((decode.first or 0.0) - prefill.sent) * 1e3

    def one_by_one(self, count: int) -> list[float]:
        return [self.finish(*self.submit()) for _ in range(count)]

    def _stop(self) -> None:
        for engine in (self.pair.decode, self.pair.prefill):
            engine.stop()


class FirstToken(Engines):
    """Requests one after another. ``name``: of the row."""

    def __init__(self, name: str, backend: str) -> None:
        super().__init__(backend)
        self._name = name

    def work(self) -> Figures:
        self.one_by_one(UNCOUNTED_REQUESTS)
        took = sorted(self.one_by_one(TIMED_REQUESTS))
        return {self._name: statistics.median(took), f"{self._name}.p99": took[int(0.99 * len(took))]}


class Wide(Engines):
    """4 MiB of KV cache a request, four at once."""

    size = WIDE
    prompt_tokens = WIDE_PROMPT_TOKENS

    def work(self) -> Figures:
        self.one_by_one(UNCOUNTED_REQUESTS)
        running = [self.submit() for _ in range(WIDE_CONCURRENCY)]
        took = []
        for _ in range(WIDE_REQUESTS):
            took.append(self.finish(*running.pop(0)))
            running.append(self.submit())
        for request in running:
            self.finish(*request)
        return {WIDE_TTFT: statistics.median(took)}


class Crowded(Engines):
    """4 MiB of KV cache a request, all asked at once."""

    size = WIDE
    prompt_tokens = WIDE_PROMPT_TOKENS
    at_both = CROWDED_ENGINES

    def work(self) -> Figures:
        self.one_by_one(UNCOUNTED_REQUESTS)
        took = sorted([self.finish(*request) for request in [self.submit() for _ in range(CROWD)]])
        return {CROWDED: statistics.median(took), f"{CROWDED}.last": took[-1]}


class Long(Engines):
    """Prompts that prefill computes in chunks, one after another. ``name``: of the row."""

    size = LONG
    request_seconds = 300.0

    def __init__(self, name: str, backend: str) -> None:
        prompts = LONG_PROMPTS[name]
        self._name, self.prompt_tokens, self.cases = name, prompts.tokens, prompts.requests
        self.at_both = both(
            chunked_prefill_size=prompts.chunk, context_length=prompts.tokens + 192, max_total_tokens=2 * prompts.tokens
        )
        super().__init__(backend)

    def work(self) -> Figures:
        took = self.one_by_one(self.cases)
        return {self._name: statistics.median(took), f"{self._name}.slowest": max(took)}


class BusyDecode(Engines):
    """Decode, alone on its core, generates for a full batch, with hand-offs arriving beside it and without.

    Prefill computes nothing and has the pages at once (sides/ready_pages.py); decode's tokens are read on its core. Of
    each request the number of tokens is looked at, not which they are, and that the prompt came from prefill, without
    which vLLM's decode would compute it and SGLang's fail.
    """

    prompt_tokens = ARRIVING_TOKENS
    at_both = BUSY_ENGINES
    pairs = FED

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self._cores = sorted(os.sched_getaffinity(0))
        for engine, core in ((self.pair.prefill, self._cores[0]), (self.pair.decode, self._cores[-1])):
            pin(engine.pids(), {core})
        self._random = random.Random(0)  # of both kinds the same

    def work(self) -> Figures:
        pin([os.getpid()], {self._cores[0]})  # so that decode's tokens are not read on its core
        try:
            return self._beside_hand_offs()
        finally:
            pin([os.getpid()], self._cores)

    def finish(self, case: Case, prefill: Request, decode: Request) -> float:
        if len(decode.result()) != len(case.tokens):
            raise RuntimeError(f"{len(decode.tokens)} tokens of {len(case.tokens)}")
        if ENGINE == "vllm" and decode.cached != len(case.prompt):
            raise RuntimeError(f"of a prompt of {len(case.prompt)} tokens decode got {decode.cached} from prefill")
        prefill.result()
        return 0.0

    def _beside_hand_offs(self) -> Figures:
        self.one_by_one(UNCOUNTED_REQUESTS)
        batch = [self.pair.submit(next(self._cases).prompt, BATCH_TOKENS) for _ in range(BATCH)]
        for prefill, _ in batch:
            prefill.result()
        wait_until(lambda: all(decode.tokens for _, decode in batch))
        generating = [decode for _, decode in batch]
        self._window(generating, 0)  # not counted: the batch is not even yet
        windows = [self._window(generating, arrivals) for arrivals in (0, *(ARRIVALS, 0) * WINDOWS)]
        alone, beside = windows[::2], windows[1::2]
        if any(decode.wait(0) for decode in generating):
            raise RuntimeError("the batch ended before its time was over")
        for decode in generating:
            self.pair.decode.abort(decode)
            decode.wait()
        return {
            DECODE_KEEPS: 100 * kept(alone, beside),
            f"{DECODE_KEEPS}.cpu": 1e3 * cpu_beside(alone, beside) / (WINDOWS * ARRIVALS),
        }

    def _window(self, generating: Sequence[Request], arrivals: int) -> Window:
        pids = self.pair.decode.pids()
        before, used = sum(len(each.tokens) for each in generating), threads.used(pids)
        start, arrived = time.monotonic(), []
        for number in range(arrivals):
            # Anywhere in its slot, so that arrivals do not keep step with decode's batches for a whole window.
            at = start + (number + self._random.random()) * WINDOW_SECONDS / arrivals
            time.sleep(max(0.0, at - time.monotonic()))
            arrived.append(self.submit())
        time.sleep(max(0.0, start + WINDOW_SECONDS - time.monotonic()))
        got = sum(len(each.tokens) for each in generating) - before
        for request in arrived:
            self.finish(*request)
        return Window(got, threads.beside_busiest(used, threads.used(pids)), time.monotonic() - start)


class Faults(Engines):
    """Prefill starts again and gets its first request; later kill -9, while decode waits for it."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        for engine in (self.pair.prefill, self.pair.decode):
            engine.go_on()
        self.one_by_one(UNCOUNTED_REQUESTS)  # decode has met the prefill whose place the first round's takes
        self.pair.prefill.kill()
        self.pair.decode.stop()

    def work(self) -> Figures:
        self.pair.restart("prefill")
        first = self.one_by_one(1)[0]
        self.one_by_one(1)
        # Prefill never hears of this one, so that it is under way when prefill dies.
        waiting = self.pair.submit_to_decode(next(self._cases).prompt, NEW_TOKENS)
        time.sleep(0.5)
        killed = self.pair.prefill.kill()
        if not waiting.wait(DETECT_SECONDS):
            self.pair.decode.abort(waiting)
            return {FIRST_REQUEST: first, DETECT: DETECT_SECONDS}
        waiting.failure(0)
        return {FIRST_REQUEST: first, DETECT: (waiting.ended or 0.0) - killed}


def pin(pids: Sequence[int], cores: Collection[int]) -> None:
    """All threads of these processes, and what they start, to these cores."""
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cores)


def sglang_pair(kind: type[Pair], folder: Path, model: Path, backend: str, more: Mapping[str, Any]) -> Pair:
    """Every request is computed, and in one go where ``more`` says no other chunk."""
    alone = {"chunked_prefill_size": 512, "disable_radix_cache": True, **more}
    environment = AS_SHIPPED
    if backend in LIMITS:
        plugin = f"benchmarks.baselines.sglang_{backend}:install"
        environment = {**AS_SHIPPED, "KVGRPC_SGLANG": "off", "SGLANG_ON_CPU_PLUGIN": plugin}
    return kind(folder, model, backend=backend, environment=environment, prefill=alone, decode=alone)


def vllm_pair(kind: type[VllmPair], folder: Path, model: Path, backend: str, more: Mapping[str, Any]) -> Pair:
    """As for SGLang."""
    alone = {"max_num_batched_tokens": 512, "enable_prefix_caching": False, **more}
    transfer = CONNECTOR if backend == "kvgrpc" else IN_TREE_CONNECTOR
    return kind(folder, model, transfer=transfer, environment=AS_SHIPPED, prefill=alone, decode=alone)


def benchmarks(starts: int = STARTS) -> list[Benchmark]:
    return [each for each in all_benchmarks(starts) if ENGINE == "sglang" or each.name not in LIMITS.values()]


def all_benchmarks(starts: int) -> list[Benchmark]:
    return [
        row(
            partial(FirstToken, TTFT),
            Metric(TTFT, "ms", "lower", IN_TREE, Target(ratio=TTFT_RATIOS[0])),
            Metric(f"{TTFT}.p99", "ms", "lower", IN_TREE, Target(ratio=TTFT_RATIOS[1])),
            starts=starts,
        ),
        *(limit(name, backend, starts) for backend, name in LIMITS.items()),
        row(Wide, Metric(WIDE_TTFT, "ms", "lower", IN_TREE, Target(ratio=1)), starts=starts),
        row(
            Crowded,
            Metric(CROWDED, "ms", "lower", IN_TREE, Target(ratio=1)),
            Metric(f"{CROWDED}.last", "ms", "lower", IN_TREE, Target(ratio=1)),
            starts=CROWD_STARTS * starts,
        ),
        *(
            row(
                partial(Long, name),
                Metric(name, "ms", "lower", IN_TREE, Target(ratio=1)),
                Metric(f"{name}.slowest", "ms", "lower", IN_TREE, Target(ratio=1)),
                warm_ups=prompts.warm_ups,
                starts=starts,
            )
            for name, prompts in LONG_PROMPTS.items()
        ),
        row(
            BusyDecode,
            Metric(DECODE_KEEPS, "%", "higher", IN_TREE, Target(below=1)),
            Metric(f"{DECODE_KEEPS}.cpu", "ms", "lower", IN_TREE),
            starts=starts,
        ),
        row(
            Faults,
            Metric(DETECT, "s", "lower", IN_TREE, Target(ratio=1, value=1)),
            Metric(FIRST_REQUEST, "ms", "lower", IN_TREE, Target(ratio=1)),
            warm_ups=0,
        ),
    ]


def limit(name: str, backend: str, starts: int) -> Benchmark:
    metrics = (Metric(name, "ms", "lower", IN_TREE), Metric(f"{name}.p99", "ms", "lower", IN_TREE))
    return Benchmark(metrics, lambda: FirstToken(name, backend), lambda: FirstToken(name, "mooncake"), starts=starts)


def row(side: Callable[[str], Engines], *metrics: Metric, warm_ups: int = 1, starts: int = 1) -> Benchmark:
    return Benchmark(metrics, lambda: side("kvgrpc"), lambda: side("mooncake"), warm_ups=warm_ups, starts=starts)


def endless(cases: Sequence[Case]) -> Iterator[Case]:
    while True:
        yield from cases


def main() -> int:
    """0 when every row ran and every token was right; missed targets are shown, they are no error."""
    parser = argparse.ArgumentParser(prog="benchmarks.engines", description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="PREFIX,…")
    parser.add_argument("--rounds", type=int, default=3, help="of each start")
    parser.add_argument("--starts", type=int, default=STARTS, help="of the pairs, for rows of a latency and decode's")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=LOG_WIDTH)
    adopt_orphans()
    rows: list[Row] = []
    problems: list[Problem] = []
    for benchmark in benchmarks(options.starts):
        if benchmark.matches(options.only):
            try:
                rows += run_quietly(benchmark, options.rounds, TRIES, partial(console.print, benchmark.name))
            except Exception as error:  # one that fails must not cost the others
                problems.append(Problem(benchmark.name, f"{type(error).__name__}: {error}"))
    show(rows, problems, console)
    if options.markdown:
        print(markdown(rows))
    store(rows, options.json)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
