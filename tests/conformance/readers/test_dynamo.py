"""Dynamo's own reader of PUB payloads, out of its crate, takes what we publish, but for what docs/consumers.md says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvgrpc.events import BlockStored
from kvgrpc.events.codec.encoder import Dialect, Encoding
from tests.conformance.readers.forms import EVENTS, STORED, ours, read, refused
from tests.support.rust import CARGO, TARGET

HERE = Path(__file__).parent / "dynamo"
GOLDEN = HERE.parents[1] / "events"
BUILD_SECONDS = 1500
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# A form that it does not take, of every encoding, or of maps alone.
DIGESTS = ("a digest", "a digest as parent", "a removal of a digest")
IN_MAPS = ("bytes as an extra key", "a list of three as an extra key")


@pytest.fixture(scope="module")
def reader() -> Path:
    if CARGO is None:
        pytest.skip("there is no cargo here")
    target = TARGET.parent / "readers"
    command = [CARGO, "build", "--quiet", "--manifest-path", str(HERE / "Cargo.toml"), "--target-dir", str(target)]
    subprocess.run(command, check=True, timeout=BUILD_SECONDS)
    return target / "debug/dynamo-reader"


@pytest.mark.parametrize("dialect", Dialect)
def test_of_maps_it_refuses_digests_and_some_extra_keys_and_nothing_else(reader: Path, dialect: Dialect) -> None:
    told = read([str(reader)], ours(Encoding.MAP, dialect))
    assert refused(told) == {*DIGESTS, *IN_MAPS}
    assert told["a removal"].startswith("removed:") and told["a clear"] == "cleared"
    blocks = [name for name, (event,) in EVENTS.items() if isinstance(event, BlockStored)]
    assert {told[name].rpartition(":")[0] for name in blocks if name not in (*DIGESTS, *IN_MAPS)} == {STORED}


@pytest.mark.parametrize("dialect", Dialect)
def test_of_arrays_it_refuses_digests_alone(reader: Path, dialect: Dialect) -> None:
    told = read([str(reader)], ours(Encoding.ARRAY, dialect))
    assert refused(told) == set(DIGESTS)
    assert {told[name].rpartition(":")[0] for name in IN_MAPS} == {STORED}
    assert told["a group"] == "", "arrays of the first form have no groups: the event is left out, the batch is there"


def test_of_the_engines_own_batches_it_refuses_digests_too(reader: Path) -> None:
    files = [path for path in GOLDEN.glob("*.msgpack") if path.name.startswith(("vllm_0_33_0", "sglang_0_5_23"))]
    told = read([str(reader)], {path.stem: path.read_bytes() for path in files})
    assert refused(told) == {"vllm_0_33_0_stored_digests", "vllm_0_33_0_removed_everything"}
