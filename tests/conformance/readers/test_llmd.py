"""llm-d's own readers of PUB payloads take what we publish, but for what docs/consumers.md says.

``TEST_LLMD`` names checkouts of llm-d-kv-cache and llm-d-router, with a colon between: no proxy here has their modules.
A test of one that is not named is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvgrpc.events.codec.encoder import Dialect, Encoding
from tests.conformance.readers.forms import EVENTS, STORED, ours, read, refused

HERE = Path(__file__).parent / "llmd"
SEARCH = f"{os.environ.get('PATH', '')}:/usr/local/go/bin"
GO = shutil.which("go", path=SEARCH)
CHECKOUTS = [Path(folder) for folder in os.environ.get("TEST_LLMD", "").split(":") if folder]
CACHE, ROUTER = "github.com/llm-d/llm-d-kv-cache", "github.com/llm-d/llm-d-router"
BUILD_SECONDS = 600
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(GO is None, reason="there is no Go here"),
    pytest.mark.timeout(700),
]


@pytest.fixture(scope="module", params=[CACHE, ROUTER])
def module(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reader(module: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its adapters and the events that they make; all else of the module asks for Kubernetes, Redis and ZMQ."""
    theirs = [each for each in CHECKOUTS if (each / "go.mod").read_text().startswith(f"module {module}\n")]
    if not theirs:
        pytest.skip(f"TEST_LLMD names no checkout of {module}")
    built, adapters = tmp_path_factory.mktemp("llmd"), "pkg/kvevents/engineadapter"
    (built / adapters).mkdir(parents=True)
    for source in (theirs[0] / "pkg/kvevents/events.go", *(theirs[0] / adapters).glob("*.go")):
        if not source.name.endswith("_test.go"):
            shutil.copy(source, built / source.relative_to(theirs[0]))
    for own in HERE.iterdir():
        (built / own.name).write_text(own.read_text().replace(CACHE, module))
    build = [str(GO), "build", "-o", "reader", "."]
    subprocess.run(build, cwd=built, env={**os.environ, "PATH": SEARCH}, check=True, timeout=BUILD_SECONDS)
    return built / "reader"


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("adapter", ["vllm", "sglang"])
def test_of_arrays_it_refuses_pairs_of_tokens_alone(reader: Path, adapter: str, dialect: Dialect) -> None:
    told = read([str(reader), adapter], ours(Encoding.ARRAY, dialect))
    assert refused(told) == {"pairs of tokens"}
    assert told["a block"].rpartition(":")[0] == STORED
    assert told["a removal"].startswith("removed:") and told["a clear"] == "cleared"


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("adapter", ["vllm", "sglang"])
def test_maps_are_read_by_one_adapter_of_the_router_alone(
    module: str, reader: Path, adapter: str, dialect: Dialect
) -> None:
    told = read([str(reader), adapter], ours(Encoding.MAP, dialect))
    reads_maps = (module, adapter) == (ROUTER, "vllm")
    assert refused(told) == ({"pairs of tokens"} if reads_maps else set(EVENTS))
