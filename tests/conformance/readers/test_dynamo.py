"""Dynamo's own reader of PUB payloads, out of its crate, takes what we publish, but for what docs/consumers.md says."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kvgrpc.events.codec.encoder import BatchEncoder, Dialect, Encoding
from tests.support.rust import CARGO, TARGET

HERE = Path(__file__).parent / "dynamo"
GOLDEN = HERE.parents[1] / "events"
BUILD_SECONDS = 1500
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HASHES = [2**63 + 5, -(2**62)]
STORED = f"stored:{2**63 + 5},{3 * 2**62}"
DIGEST = b"\x01" * 32


def stored(**fields: Any) -> BlockStored:
    told = {"block_hashes": HASHES, "parent_block_hash": None, "token_ids": list(range(32)), "block_size": 16}
    return BlockStored(**{**told, "medium": "GPU", **fields})


EVENTS: dict[str, list[Any]] = {
    "a block": [stored()],
    "the host's": [stored(medium="CPU")],
    "no medium": [stored(medium=None)],
    "a parent": [stored(parent_block_hash=-(2**62) - 1)],
    "an adapter": [stored(lora_id=1, lora_name="sql")],
    "a salt": [stored(cache_salt="tenant")],
    "a salt of vLLM's": [stored(extra_keys=[["tenant"], None])],
    "an image": [stored(extra_keys=[[["0123abcd", 3]], None])],
    "a group": [stored(group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128)],
    "pairs of tokens": [stored(token_ids=[[token, token + 1] for token in range(32)])],
    "a removal": [BlockRemoved(HASHES, "GPU")],
    "a clear": [AllBlocksCleared()],
    # As of a digest: bytes that happen to be text it takes for text.
    "bytes as an extra key": [stored(extra_keys=[[b"\xff\x01\x02\x03"], None])],
    "a list of three as an extra key": [stored(extra_keys=[[["0123abcd", 3, 4]], None])],
    "a digest": [stored(block_hashes=[DIGEST])],
    "a digest as parent": [stored(parent_block_hash=DIGEST)],
    "a removal of a digest": [BlockRemoved([DIGEST], "GPU")],
}
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


def read(reader: Path, payloads: dict[str, bytes]) -> dict[str, str]:
    """What it makes of each batch."""
    lines = "\n".join(payload.hex() for payload in payloads.values())
    done = subprocess.run([reader], input=lines, capture_output=True, text=True, timeout=60, check=True)
    return dict(zip(payloads, done.stdout.splitlines(), strict=True))


def ours(encoding: Encoding, dialect: Dialect) -> dict[str, bytes]:
    encoder = BatchEncoder(dialect, encoding, 0)
    return {name: encoder.encode(KVEventBatch(1.5, events)) for name, events in EVENTS.items()}


def refused(told: dict[str, str]) -> set[str]:
    return {name for name, line in told.items() if line.startswith("refused")}


@pytest.mark.parametrize("dialect", Dialect)
def test_of_maps_it_refuses_digests_and_some_extra_keys_and_nothing_else(reader: Path, dialect: Dialect) -> None:
    told = read(reader, ours(Encoding.MAP, dialect))
    assert refused(told) == {*DIGESTS, *IN_MAPS}
    assert told["a removal"].startswith("removed:") and told["a clear"] == "cleared"
    blocks = [name for name, (event,) in EVENTS.items() if isinstance(event, BlockStored)]
    assert {told[name].rpartition(":")[0] for name in blocks if name not in (*DIGESTS, *IN_MAPS)} == {STORED}


@pytest.mark.parametrize("dialect", Dialect)
def test_of_arrays_it_refuses_digests_alone(reader: Path, dialect: Dialect) -> None:
    told = read(reader, ours(Encoding.ARRAY, dialect))
    assert refused(told) == set(DIGESTS)
    assert {told[name].rpartition(":")[0] for name in IN_MAPS} == {STORED}
    assert told["a group"] == "", "arrays of the first form have no groups: the event is left out, the batch is there"


def test_of_the_engines_own_batches_it_refuses_digests_too(reader: Path) -> None:
    files = [path for path in GOLDEN.glob("*.msgpack") if path.name.startswith(("vllm_0_33_0", "sglang_0_5_23"))]
    told = read(reader, {path.stem: path.read_bytes() for path in files})
    assert refused(told) == {"vllm_0_33_0_stored_digests", "vllm_0_33_0_removed_everything"}
