"""The router of examples/router over a fleet whose engines and indexes die: no request waits for them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.events.log.digest import hash_key
from kvgrpc.server import RegistryServer
from kvgrpc.v1 import index_service_pb2 as pb
from tests.support.prefix_cache import hash_of, requests
from tests.support.rust import built_index
from tests.support.traced_engine import TracedEngine
from tests.support.waiting import wait_until

ENGINES, RATE, SECONDS = 4, 200, 12.0
# All of a trace that is named, or so many of the sample, which begins anew when it ends.
REQUESTS = sum(1 for _ in requests()) if os.environ.get("TEST_TRACE") else round(RATE * SECONDS)
ENGINE_DIES, INDEX_DIES = 3.0, (5.0, 8.5)
INDEX_IS_BACK_AFTER = 1.0
WAIT_SECONDS, GONE_SECONDS = 0.02, 1.0
# By which a thread may wake up later than it asked to; how many may wake up later than that, and by how much: a
# router that gets no processor waits for that, and not for an index.
AWAKE_SECONDS, LATE_SHARE, LATE_SECONDS = 0.005, 0.01, 0.5
CURRENT = pb.INDEX_SOURCE_STATE_CURRENT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def example() -> Any:
    path = Path(__file__).parents[2] / "examples/router/router.py"
    spec = util.spec_from_file_location("example_router", path)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Router: Any = example().Router


class Sent(NamedTuple):
    """A request that reached an engine, or did not (``arrived``)."""

    at: float
    waited: float
    engine: str
    blocks: int
    arrived: bool


class TraceRouter(Router):
    """The example with what is left to its user: what a prompt begins with, and how a request reaches an engine."""

    def __init__(self, registry: str, indexes: Sequence[str], engines: dict[str, TracedEngine]) -> None:
        super().__init__(registry, indexes)
        self.engines = engines
        self.sent: list[Sent] = []
        self._one = {name: threading.Lock() for name in engines}

    def prefix(self, tokens: Sequence[int]) -> pb.ScorePrompt:
        """Requests of the trace are named by their blocks."""
        return pb.ScorePrompt(block_hashes=pb.BlockHashes(values=[hash_key(hash_of(block)) for block in tokens]))

    def route(self, blocks: list[int]) -> None:
        began = time.monotonic()
        at = self.plan(blocks)
        now = time.monotonic()
        assert at is not None, "no engine is known to live"
        arrived = True
        try:
            with self._one[at.engine]:
                self.engines[at.engine].call("request", blocks)
        except (OSError, EOFError):
            arrived = False
        self.sent.append(Sent(now, now - began, at.engine, at.blocks, arrived))


class IndexProcess:
    """An index at one address, killed and started again."""

    def __init__(self, program: Sequence[str], registry: str) -> None:
        self._command, self.address = [*program, "--registry", registry], "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        command = [*self._command, "--listen", self.address]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().split()[-1]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def current(self) -> int:
        with SyncClient(self.address) as client:
            return sum(source.freshness.state == CURRENT for source in client.list_sources())


@pytest.fixture
def registry() -> Iterator[str]:
    server = RegistryServer(["127.0.0.1:0"]).open()
    yield server.address
    server.close()


@pytest.fixture
def engines(registry: str) -> Iterator[dict[str, TracedEngine]]:
    made = {f"engine-{number}": TracedEngine(f"engine-{number}", registry) for number in range(ENGINES)}
    yield {name: engine.opened() for name, engine in made.items()}
    for engine in made.values():
        engine.end()


@pytest.fixture(params=["python", "native"])
def indexes(
    request: pytest.FixtureRequest, registry: str, engines: dict[str, TracedEngine]
) -> Iterator[list[IndexProcess]]:
    native = request.param == "native"
    program = [built_index()] if native else [sys.executable, "-m", "kvgrpc", "serve", "index"]
    made = [IndexProcess(program, registry) for _ in range(2)]
    for each in made:
        wait_until(lambda each=each: each.current() == ENGINES)  # type: ignore[misc]
    yield made
    for each in made:
        each.kill()


def at_even_distances(router: TraceRouter, begin: float) -> None:
    """So many requests of the trace a second, whatever becomes of those before."""
    trace = itertools.cycle(requests())
    with ThreadPoolExecutor(64) as pool:
        for number in range(REQUESTS):
            time.sleep(max(0.0, begin + number / RATE - time.monotonic()))  # the pace of the requests
            pool.submit(router.route, next(trace)).add_done_callback(lambda done: done.result())


def test_no_request_waits_for_an_index_or_goes_to_an_engine_that_is_gone(
    registry: str, engines: dict[str, TracedEngine], indexes: list[IndexProcess]
) -> None:
    router, begin = TraceRouter(registry, [each.address for each in indexes], engines), time.monotonic() + 0.5
    router.learn()
    routing = threading.Thread(target=at_even_distances, args=(router, begin))
    routing.start()
    killed_at, unplanned = 0.0, []
    time.sleep(max(0.0, begin + ENGINE_DIES - time.monotonic()))  # when it dies
    killed_at = engines["engine-0"].kill()
    for index, second in zip(indexes, INDEX_DIES, strict=True):
        time.sleep(max(0.0, begin + second - time.monotonic()))  # when it dies
        before = router.unplanned
        index.kill()
        time.sleep(INDEX_IS_BACK_AFTER)  # the outage
        index.start()
        wait_until(lambda index=index: index.current() == ENGINES - 1)  # type: ignore[misc]
        unplanned.append(router.unplanned - before)
    routing.join(60 + REQUESTS / RATE)
    router.close()
    said = Counter(sent.engine for sent in router.sent)
    found = sum(sent.blocks > 0 for sent in router.sent)
    waits = sorted(sent.waited for sent in router.sent)
    at = [sent.at - begin for sent in router.sent if sent.waited > WAIT_SECONDS + AWAKE_SECONDS]
    late_share = len(at) / len(waits)
    print(f"{said}, {found} found something, unplanned {unplanned} of {router.unplanned}")
    print(f"longest waits {waits[-5:]}, {late_share:.2%} late, at {sorted(Counter(map(round, at)).items())} s")
    assert len(router.sent) == REQUESTS, "a request was lost"
    assert late_share <= LATE_SHARE and waits[-1] < WAIT_SECONDS + LATE_SECONDS
    assert all(count <= RATE for count in unplanned), "more than a second's worth when one index died"
    late = [sent.at - killed_at for sent in router.sent if sent.engine == "engine-0" and sent.at > killed_at]
    assert max(late, default=0.0) <= GONE_SECONDS
    assert all(sent.arrived for sent in router.sent if sent.engine != "engine-0")
    assert len([name for name in said if name != "engine-0"]) == ENGINES - 1
    assert found > len(router.sent) / 2, "an index was blind"
