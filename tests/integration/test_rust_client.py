"""The Rust client against a real registry that wants tokens: its example is what its README says."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.server import RegistryServer
from tests.support.rank_host import RankHost
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
CARGO = shutil.which("cargo", path=f"{os.environ.get('PATH', '')}:{Path.home()}/.cargo/bin")
SECRET = "9f86d081884c7d659a2feaa0c55ad015"

pytestmark = pytest.mark.skipif(CARGO is None, reason="there is no cargo here")


@pytest.fixture(scope="module")
def example() -> str:
    """The example, built as ``.ci/rust`` builds it."""
    assert CARGO is not None
    manifest = ROOT / "clients/rust/Cargo.toml"
    target = ROOT / ".cache/rust"
    command = [CARGO, "build", "--quiet", "--example", "engines", "--manifest-path", str(manifest)]
    subprocess.run([*command, "--target-dir", str(target)], check=True, timeout=900)
    return str(target / "debug/examples/engines")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"consumer:{SECRET}\nrank:{SECRET}r\n")
    server = RegistryServer(["127.0.0.1:0"], lease_ttl=60.0, security=ServerSecurity(token_file=str(tokens))).open()
    yield server.address
    server.close()


def run(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([example, *arguments], capture_output=True, text=True, timeout=60)


def test_engines_are_listed_and_a_refusal_has_its_reason_and_metadata(example: str) -> None:
    rank = RankHost("P", "PREFILL", {"registry": "embedded", "lease_ttl": 1.0})
    lines = ["P ROLE_PREFILL ready=true", "EngineNotFound engine=nobody"]
    wait_until(lambda: run(example, rank.rank.address).stdout.splitlines() == lines)  # a registry warms up for a lease
    rank.close(2.0)


def test_a_token_lets_in_and_none_does_not(example: str, registry: str) -> None:
    assert run(example, registry, SECRET).stdout.splitlines() == ["WarmingUp engine=nobody"]
    refused = run(example, registry)
    assert refused.returncode == 1 and "CredentialsInvalid" in refused.stderr
    assert "ShortSecret" in run(example, registry, "short").stderr
