"""Writes vectors.json by the rule in docs/tokens.md, with nothing of kvgrpc but the spelling of targets."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from pathlib import Path

from kvgrpc.net import target_of

SECRETS = ("9f86d081884c7d659a2feaa0c55ad015", "correct-horse-battery-staple")
ADDRESSES = (
    "10.0.0.7:9001",
    "Prefill-7.Engines.SVC:50051",
    "prefill-7.engines.svc.:50051",
    "localhost:08998",
    "[fd00:0:0::7]:9001",
    "[FD00::7]:9001",
    "[::ffff:10.0.0.7]:9001",
    "unix:/run/kvgrpc/p0.sock",
    "unix:///run/kvgrpc/p0.sock",
    "unix-abstract:kvgrpc-p0",
)
TIMES = (1_764_000_000, 0)


def mac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def vector(secret: str, address: str, second: int) -> dict[str, object]:
    target = target_of(address)
    key_id = mac(secret.encode(), "kvgrpc1 key id").hex()[:16]
    key = mac(secret.encode(), "kvgrpc1 audience " + target)
    signed = f"kvgrpc1.{key_id}.{second}.{encoded(target.encode())}"
    return {
        "secret": secret,
        "address": address,
        "time": second,
        "target": target,
        "key_id": key_id,
        "audience_key": key.hex(),
        "authorization": f"Bearer {signed}.{encoded(mac(key, signed))}",
    }


def vectors() -> list[dict[str, object]]:
    return [vector(SECRETS[0], address, TIMES[0]) for address in ADDRESSES] + [
        vector(SECRETS[1], ADDRESSES[0], second) for second in TIMES
    ]


if __name__ == "__main__":
    Path(__file__).with_name("vectors.json").write_text(json.dumps(vectors(), indent=2) + "\n")
