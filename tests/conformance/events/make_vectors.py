"""Writes the vectors of today's engines with the engines' own classes, out of their published wheels.

    python make_vectors.py sglang=WHEEL_OR_SITE_PACKAGES vllm=WHEEL_OR_SITE_PACKAGES

Replaces the files ``ENGINE_VERSION_*.msgpack`` beside it and their cases in ``cases.json``. It needs msgspec, pyzmq and
pydantic, not the engines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from engine_classes import load, version

HERE = Path(__file__).parent
RANK = {"sglang": "attn_dp_rank", "vllm": "data_parallel_rank"}
DIGEST = "hex:" + bytes(range(32)).hex()


def stored(
    *hashes: object, parent: object = None, tokens: Any = (10, 11), size: int = 2, **more: object
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [*hashes],
        "parent_block_hash": parent,
        "token_ids": [*tokens],
        "block_size": size,
        "lora_id": None,
        **more,
    }


def removed(*hashes: object, **more: object) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [*hashes], **more}


CLEARED = {"type": "AllBlocksCleared"}
CASES: dict[str, dict[str, list[dict[str, Any]]]] = {
    "sglang": {
        "stored": [stored(1, -2, tokens=(10, 11, 12, 13), medium="GPU")],
        "stored_without_medium": [stored(-(2**63), parent=2**63 - 1)],
        "stored_everything": [
            stored(5, parent=-6, medium="CPU_PINNED", cache_salt="salt", session_id="s-1", lora_name="adapter")
        ],
        "stored_bigrams": [stored(7, tokens=([10, 11], [11, 12]), medium="GPU")],
        "stored_64_blocks": [stored(*range(100, 164), tokens=range(70_000, 70_128), medium="DISK")],
        "removed": [removed(1, -2, medium="GPU")],
        "removed_without_medium": [removed(-2)],
        "cleared": [CLEARED],
        "mixed": [CLEARED, stored(1, medium="GPU"), removed(1, medium="GPU")],
        "empty": [],
    },
    "vllm": {
        "stored": [stored(0xF000000000000001, parent=1, medium="GPU", lora_name=None)],
        "stored_group": [
            stored(
                2**64 - 1,
                medium="GPU",
                lora_name=None,
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        ],
        "stored_digests": [stored(DIGEST, parent=DIGEST, medium="GPU", lora_name=None)],
        "stored_everything": [
            stored(
                8,
                9,
                tokens=(10, 11, 12, 13),
                medium="STORAGE",
                lora_id=3,
                lora_name="adapter",
                extra_keys=[["adapter", ["image", 4], "salt"], None],
                group_idx=2,
                kv_cache_spec_kind="sliding_window",
                kv_cache_spec_sliding_window=1024,
                locality="REMOTE",
                ownership="tier",
                session_id="s-1",
                lookahead_token_ids=[[14], [15, 16]],
            )
        ],
        "stored_placeholder": [stored(9, tokens=(), size=0, medium="CPU", lora_name=None)],
        "removed": [removed(0xF000000000000001, medium="GPU", group_idx=0)],
        "removed_without_medium": [removed(3, medium=None)],
        "removed_everything": [removed(DIGEST, medium="CPU", group_idx=1, locality="LOCAL", ownership="tier")],
        "cleared": [CLEARED],
        "mixed": [stored(1, medium="GPU", lora_name=None), removed(1, medium="CPU"), CLEARED],
        "empty": [],
    },
}


def main(arguments: list[str]) -> None:
    sources = dict(argument.split("=", 1) for argument in arguments)
    path = HERE / "cases.json"
    cases = json.loads(path.read_text())
    for engine, source in sources.items():
        classes, prefix = load(engine, source), f"{engine}_{version(engine, source).replace('.', '_')}_"
        for old in HERE.glob(f"{engine}_*.msgpack"):
            old.unlink()
            cases.pop(old.stem, None)
        for rank, (name, events) in enumerate(CASES[engine].items()):
            batch = classes.KVEventBatch(1.5, [event(classes, fields) for fields in events], rank % 3)
            (HERE / f"{prefix}{name}.msgpack").write_bytes(msgspec.msgpack.encode(batch))
            cases[prefix + name] = {
                "dialect": engine,
                "encoding": "map",
                "ts": 1.5,
                "rank": rank % 3,
                "events": events,
            }
    path.write_text(json.dumps(cases, indent=2) + "\n")


def event(classes: Any, fields: dict[str, Any]) -> Any:
    kind = getattr(classes, fields["type"])
    return kind(**{name: plain(value) for name, value in fields.items() if name != "type"})


def plain(value: Any) -> Any:
    """Values as the engine has them: a digest is bytes, and what one block's extra keys are is a tuple."""
    if isinstance(value, str) and value.startswith("hex:"):
        return bytes.fromhex(value[4:])
    return [plain(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main(sys.argv[1:])
