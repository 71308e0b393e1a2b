"""The route over SGLang's own backend name, and a registry that is a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from tests.engines.engine import LOCAL, ROOT, Pair, free_port
from tests.engines.model import Reference

pytestmark = pytest.mark.timeout(230)
REGISTRY_PORT = free_port()


class Registry:
    """``kvgrpc serve registry`` on one port, time and again."""

    def __init__(self) -> None:
        self.address = f"{LOCAL}:{REGISTRY_PORT}"
        self._process = self._start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(5)

    def restart(self) -> None:
        self.kill()
        self._process = self._start()

    def knows_prefill(self, seconds: float = 20.0) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with SyncClient(self.address) as client:
                if client.list_engines():
                    return True
            time.sleep(0.2)
        return False

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "kvgrpc", "serve", "registry", "--listen", self.address], cwd=ROOT
        )


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    registry = Registry()
    yield registry
    registry.kill()


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference, registry: Registry) -> Iterator[Pair]:
    environment = {"KVGRPC_SGLANG": "mooncake", "KVGRPC_REGISTRY": registry.address}
    pair = Pair(folder, reference.path, backend="mooncake", environment=environment)
    yield pair.wait_ready()
    pair.close()


def serves(pair: Pair, reference: Reference) -> None:
    case = reference.case(100)
    prefill, decode = pair.submit(case.prompt, 8)
    assert decode.result() == case.tokens
    assert prefill.result() == case.tokens[:1]


def test_the_name_of_sglangs_own_backend_leads_to_kvgrpc(pair: Pair, reference: Reference) -> None:
    serves(pair, reference)
    assert all("room must be 1 to 2^63-1" in side.failure(5) for side in pair.submit([5] * 20, 4, 0))


def test_requests_go_on_without_the_registry(pair: Pair, reference: Reference, registry: Registry) -> None:
    serves(pair, reference)
    registry.kill()
    for _ in range(3):
        serves(pair, reference)
    registry.restart()


def test_a_restarted_registry_learns_of_prefill_which_a_new_decode_then_finds(
    pair: Pair, reference: Reference, registry: Registry
) -> None:
    registry.restart()
    assert registry.knows_prefill()
    pair.decode.kill()
    pair.restart("decode")
    serves(pair, reference)
