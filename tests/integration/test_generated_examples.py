"""Any other language: what generators make of the protos in Java and C++ reads a real registry, rank and refusal."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from kvgrpc.events.log.digest import mix
from tests.support.rank_host import RankHost
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
JAVA = ROOT / "clients/java/target"
COMMANDS = {
    "java": ["java", "-cp", f"{JAVA}/example.jar:{JAVA}/lib/*", "dev.kvgrpc.examples.Engines"],
    "cpp": [str(ROOT / ".cache/cpp/engines")],
}
BUILT = {"java": JAVA / "example.jar", "cpp": ROOT / ".cache/cpp/engines"}
HASHES = [1, 2**64 - 3, 5]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("language", COMMANDS)
def test_a_generated_client_lists_engines_reads_a_digest_and_names_a_refusal(language: str) -> None:
    if not BUILT[language].exists() or shutil.which(COMMANDS[language][0]) is None:
        pytest.skip(f".ci/{language} was not run")
    rank = RankHost("P", "PREFILL", {"registry": "embedded", "lease_ttl": 1.0, "events": {"publisher": "null"}})
    stored = {"type": "BlockStored", "block_hashes": HASHES, "token_ids": [7] * 48, "block_size": 16}
    rank.publish([msgspec.msgpack.encode([1.0, [stored], 0])])
    mixed = sum(map(mix, HASHES)) % 2**64
    lines = [
        "P ROLE_PREFILL 1/1",
        f"blocks GPU=3 mixed={mixed}",
        "ERROR_REASON_ENGINE_NOT_FOUND engine=nobody missingRanks=all role=",
    ]
    try:
        # A registry warms up for a lease.
        wait_until(lambda: said_by(language, rank.rank.address) == lines, seconds=90)
    finally:
        rank.close(2.0)


def said_by(language: str, address: str) -> list[str]:
    done = subprocess.run([*COMMANDS[language], address], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
