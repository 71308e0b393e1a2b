"""Writes ``NAME.json`` and ``NAME.binpb``: ``python -m tests.conformance.messages.make_messages``, in the root.

The JSON is as it stands here, and buf makes the bytes of it from the protos alone: no generated code is asked.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).parent
MOST = "18446744073709551615"
RANK = {"engine": "P", "dp": 1, "pp": 2, "cp": 3, "tp": 4}

# Name of the message, a dot, what the case is about. Values that languages differ in: the most of 64 bits, presence of
# zeros, bytes, text beyond ASCII, durations and times with fractions, doubles that are no numbers, kinds of a oneof.
MESSAGES: dict[str, dict[str, object]] = {
    "RegisterRequest.row": {
        "rows": [
            {
                "rank": {"rank": RANK, "epoch": "1700000000000001"},
                "role": "ROLE_PREFILL",
                "endpoints": {"grpc": "[::1]:50051", "eventsPub": "tcp://10.0.0.7:5557"},
                "layout": {"dp": 2, "pp": 3, "cp": 4, "tp": 5},
                "pools": [
                    {
                        "name": "kv",
                        "kind": "POOL_KIND_KV",
                        "pageTokens": 64,
                        "pages": 4294967295,
                        "dtype": "bfloat16",
                        "regions": [{"component": "k", "address": MOST, "pageStrideBytes": MOST, "pageBytes": "4096"}],
                    }
                ],
                "dataPlane": "mooncake",
                "engineSelectsDp": True,
                "model": {"name": "llama", "attention": "ATTENTION_KIND_MLA"},
                "servesEvents": True,
            }
        ]
    },
    "KeepAliveRequest.leases": {"leaseIds": ["1", "9007199254740993", MOST]},
    "RegisterResponse.ttl": {"leases": [{"rank": {"rank": RANK}, "leaseId": MOST}], "ttl": "10.000000001s"},
    "RankSelector.zeros": {"dp": 0, "tp": 0},
    "RankSelector.empty": {},
    "WatchRequest.from_zero": {"engine": "P", "logId": "0123456789abcdef0123456789abcdef", "fromSequence": "0"},
    "WatchRequest.typed": {
        "mode": "WATCH_MODE_TAIL",
        "encoding": "WATCH_ENCODING_TYPED",
        "endSequence": MOST,
        "tiers": ["TIER_DEVICE", "TIER_STORAGE"],
        "groups": [0, 7],
    },
    "WatchResponse.raw": {"raw": {"firstSequence": MOST, "payloads": ["kwGQAA==", "", "/wA="]}},
    "WatchResponse.dropped": {"dropped": {"firstSequence": "1", "lastSequence": "2", "cause": "too_large"}},
    "WatchResponse.typed": {
        "typed": {
            "firstSequence": "3",
            "batches": [
                {
                    "unixSeconds": 1.5,
                    "events": [
                        {
                            "stored": {
                                "blockHashes": [{"value": MOST}, {"digest": "AAECAwQFBgc="}],
                                "parentBlockHash": {"value": "0"},
                                "tokenIds": [1, 4294967295],
                                "pageTokens": 2,
                                "tier": "TIER_HOST",
                                "medium": "CPU_PINNED",
                                "group": 1,
                                "loraId": "-9223372036854775808",
                                "slidingWindow": 0,
                                "cacheSalt": "Mäuse",
                            }
                        },
                        {"removed": {"blockHashes": [{"value": "1"}], "tier": "TIER_DEVICE"}},
                        {"cleared": {"scope": "CLEAR_SCOPE_MEDIUM", "tier": "TIER_STORAGE", "medium": "DISK"}},
                        {"unknown": "kaF4"},
                    ],
                },
                {"unixSeconds": "NaN"},
                {"unixSeconds": "-Infinity"},
            ],
        }
    },
    "WatchResponse.heartbeat": {
        "heartbeat": {
            "nextSequence": "640",
            "state": {
                "nextSequence": "640",
                "tiers": [{"tier": "TIER_DEVICE", "medium": "GPU", "blocks": "3", "mixedHashes": MOST}],
                "kind": "DIGEST_KIND_MIX64_SUM",
                "doubtful": True,
            },
        }
    },
    "ScoreRequest.prompts": {
        "prompts": [
            {"blockHashes": {"values": ["1", MOST]}, "model": "llama"},
            {"sglang": {"tokenIds": [4294967295], "pageTokens": 1, "extraKey": ""}},
            {
                "vllm": {
                    "tokenIds": [1],
                    "lora": {"name": "a", "path": "/b"},
                    "multimodal": [{"identifier": "i", "tokens": 1}],
                }
            },
        ],
        "maxStaleness": "0.500s",
    },
    "PlanResponse.pull": {
        "plans": [
            {
                "placements": [
                    {
                        "engine": "P0",
                        "hostBlocks": 4294967295,
                        "pull": {"engine": "P1", "bytes": MOST, "bytesPerSecond": "Infinity", "time": "0.000000001s"},
                        "computeTokens": MOST,
                        "firstTokenTime": "0s",
                        "load": {"prefillTokensPerSecond": 0.5, "waitingTokens": MOST},
                    }
                ],
                "blocks": 3,
            }
        ]
    },
    "CacheOperation.failed": {
        "operationId": "a",
        "state": "OPERATION_STATE_FAILED",
        "revision": MOST,
        "priority": -1000,
        "startTime": "2026-11-24T03:04:05.000000678Z",
        "took": "3600s",
        "pageOutcomes": ["PAGE_OUTCOME_OK", "PAGE_OUTCOME_UNSPECIFIED", "PAGE_OUTCOME_TIMEOUT"],
        "failure": {
            "reason": "ERROR_REASON_STORAGE_FAILED",
            "metadata": {"backend": "file"},
            "origin": {"rank": RANK, "epoch": "5"},
            "time": "1970-01-01T00:00:00Z",
            "retryAfter": "0.250s",
        },
    },
    "PromptPages.tokens": {"tokens": ["0", MOST], "extraKey": "", "bigram": True},
    "PurgePagesResponse.counted_zero": {"devicePages": "1", "storagePages": "0"},
}


def main() -> None:
    for name, written in MESSAGES.items():
        path = FOLDER / f"{name}.json"
        path.write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n")
        message = f"kvgrpc.v1.{name.partition('.')[0]}"
        command = [".venv-gen/bin/buf", "convert", "protos", "--type", message, "--from", str(path)]
        subprocess.run([*command, "--to", str(path.with_suffix(".binpb"))], cwd=ROOT, check=True, timeout=60)


if __name__ == "__main__":
    main()
