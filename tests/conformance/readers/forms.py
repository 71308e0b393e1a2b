"""What we publish in each form, for readers of others."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

from kvgrpc.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kvgrpc.events.codec.encoder import BatchEncoder, Dialect, Encoding

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
    # As of a digest: bytes that happen to be text are taken for text by Dynamo.
    "bytes as an extra key": [stored(extra_keys=[[b"\xff\x01\x02\x03"], None])],
    "a list of three as an extra key": [stored(extra_keys=[[["0123abcd", 3, 4]], None])],
    "a digest": [stored(block_hashes=[DIGEST])],
    "a digest as parent": [stored(parent_block_hash=DIGEST)],
    "a removal of a digest": [BlockRemoved([DIGEST], "GPU")],
}


def ours(encoding: Encoding, dialect: Dialect) -> dict[str, bytes]:
    """A payload for each form, by its name."""
    encoder = BatchEncoder(dialect, encoding, 0)
    return {name: encoder.encode(KVEventBatch(1.5, events)) for name, events in EVENTS.items()}


def read(reader: Sequence[str], payloads: dict[str, bytes]) -> dict[str, str]:
    """Returns what another reader makes of each batch."""
    lines = "\n".join(payload.hex() for payload in payloads.values())
    done = subprocess.run(reader, input=lines, capture_output=True, text=True, timeout=60, check=True)
    return dict(zip(payloads, done.stdout.splitlines(), strict=True))


def refused(told: dict[str, str]) -> set[str]:
    """The forms that it takes nothing of."""
    return {name for name, line in told.items() if line.startswith("refused")}
