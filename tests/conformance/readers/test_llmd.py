"""llm-d's own reader of PUB payloads takes what we publish, but for what docs/consumers.md says.

``TEST_LLMD`` names a checkout of llm-d-kv-cache, as its module comes from no proxy here; without one this is skipped.
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
CHECKOUT = os.environ.get("TEST_LLMD", "")
BUILD_SECONDS = 600
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(GO is None, reason="there is no Go here"),
    pytest.mark.skipif(not CHECKOUT, reason="TEST_LLMD names no checkout of llm-d-kv-cache"),
    pytest.mark.timeout(700),
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its adapters and the events that they make; all else of the module asks for Kubernetes, Redis and ZMQ."""
    module, theirs = tmp_path_factory.mktemp("llmd"), Path(CHECKOUT) / "pkg/kvevents"
    adapters = module / "pkg/kvevents/engineadapter"
    adapters.mkdir(parents=True)
    shutil.copy(theirs / "events.go", module / "pkg/kvevents")
    for source in (theirs / "engineadapter").glob("*.go"):
        if not source.name.endswith("_test.go"):
            shutil.copy(source, adapters)
    for own in HERE.iterdir():
        shutil.copy(own, module)
    build = [str(GO), "build", "-o", "reader", "."]
    subprocess.run(build, cwd=module, env={**os.environ, "PATH": SEARCH}, check=True, timeout=BUILD_SECONDS)
    return module / "reader"


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("adapter", ["vllm", "sglang"])
def test_of_arrays_it_refuses_pairs_of_tokens_alone(reader: Path, adapter: str, dialect: Dialect) -> None:
    told = read([str(reader), adapter], ours(Encoding.ARRAY, dialect))
    assert refused(told) == {"pairs of tokens"}
    assert told["a block"].rpartition(":")[0] == STORED
    assert told["a removal"].startswith("removed:") and told["a clear"] == "cleared"


@pytest.mark.parametrize("adapter", ["vllm", "sglang"])
def test_it_reads_no_maps(reader: Path, adapter: str) -> None:
    assert refused(read([str(reader), adapter], ours(Encoding.MAP, Dialect.VLLM))) == set(EVENTS)
