"""How an operator may start it: what ends a start, the route over SGLang's own backend name, an external registry."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.engines.sglang import EX_CONFIG
from tests.engines.engine import LOCAL, ROOT, Engine, Pair, engine_arguments
from tests.engines.model import Reference
from tests.support.ports import free_port

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
    """On all interfaces, too, as over several machines: plaintext has to be meant, and peers get SGLang's own IP."""
    environment = {"KVGRPC_SGLANG": "mooncake", "KVGRPC_REGISTRY": registry.address, "KVGRPC_INSECURE": "1"}
    everywhere = {"host": "0.0.0.0"}
    pair = Pair(
        folder, reference.path, backend="mooncake", environment=environment, prefill=everywhere, decode=everywhere
    )
    yield pair.wait_ready()
    pair.close()


def test_a_plug_in_that_cannot_work_ends_every_process_of_sglang_at_its_start() -> None:
    script = "from sglang.srt.plugins import load_plugins; load_plugins(); print('SGLang goes on')"
    environment = {**os.environ, "KVGRPC_SGLANG": "nixl"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (EX_CONFIG, "")
    assert "KVGRPC_SGLANG: must be backend, mooncake or off, not 'nixl'" in done.stderr


# A variable or an argument; why it is refused, and what to do.
REFUSED: dict[str, tuple[dict[str, str], dict[str, object], str]] = {
    "variable": (
        {"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": "0"},
        {},
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0: pages would be used again while prefill may still write "
        "to them; unset it",
    ),
    "argument": (
        {},
        {"enable_pd_role_switch": True},
        "--enable-pd-role-switch: a rank keeps the role that it was opened with; start prefill and decode engines",
    ),
}


@pytest.mark.parametrize(("variables", "more", "refusal"), REFUSED.values(), ids=REFUSED)
def test_a_setting_that_would_make_wrong_tokens_ends_the_start_with_what_to_do(
    folder: Path, reference: Reference, variables: dict[str, str], more: dict[str, object], refusal: str
) -> None:
    arguments = {
        **engine_arguments(reference.path, 1),
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "kvgrpc",
        "disaggregation_decode_retraction_backup": "none",
        "port": free_port(),
        **more,
    }
    engine = Engine("decode", folder, arguments, variables)
    try:
        assert engine.wait_gone(120), engine.log_tail()
        assert f"FEATURE_DISABLED: kvgrpc does not serve {refusal}" in engine.log()
    finally:
        engine.close()


def serves(pair: Pair, reference: Reference) -> None:
    case = reference.case(100)
    prefill, decode = pair.submit_unseen(case.prompt, 8)
    assert decode.result() == case.tokens
    assert prefill.result() == case.tokens[:1]


def test_the_name_of_sglangs_own_backend_leads_to_kvgrpc(pair: Pair, reference: Reference) -> None:
    serves(pair, reference)
    assert all("INVALID_REQUEST" in side.failure(5) for side in pair.submit([5] * 20, 4, 0))


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
