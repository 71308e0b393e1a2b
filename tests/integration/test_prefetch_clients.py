"""PrefetchService from Go and TypeScript: their own tests, with the generated stubs, against a real rank."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cache_serving import CacheRank, hashes_of, open_cache_rank, prompt

CLIENTS = Path(__file__).parents[2] / "clients"
SEARCH = f"{os.environ.get('PATH', '')}:/usr/local/go/bin"
GO = shutil.which("go", path=SEARCH)
BUILT = CLIENTS / "typescript/dist/test/prefetch.test.js"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheRank]:
    """Storage has the six pages of the tokens 0 to 23, the host has none."""
    opened = open_cache_rank(tmp_path)
    opened.store(hashes_of(prompt(6)))
    yield opened
    opened.close()


def run(cache: CacheRank, folder: Path, *command: str) -> str:
    direct = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**direct, "PATH": SEARCH, "KVGRPC_TEST_CACHE": cache.address},
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cache.assert_bytes(hashes_of(prompt(6)))
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(GO is None, reason="there is no Go here")
def test_go_drives_and_watches_a_cache(cache: CacheRank) -> None:
    name = "TestTheCacheOfARankIsDrivenAndWatched"
    said = run(cache, CLIENTS / "go", str(GO), "test", "-count=1", "-v", "-run", f"^{name}$", ".")
    assert f"--- PASS: {name}" in said, "and was not skipped"


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node here")
@pytest.mark.skipif(not BUILT.exists(), reason=".ci/typescript was not run")
def test_typescript_drives_and_watches_a_cache(cache: CacheRank) -> None:
    said = run(cache, CLIENTS / "typescript", "node", "--test", "--test-reporter=tap", str(BUILT))
    assert "# pass 1" in said and "# skipped 0" in said
