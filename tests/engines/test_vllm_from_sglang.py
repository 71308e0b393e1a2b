"""A prompt that SGLang computed is decoded by vLLM: two engines, each in its own environment, one hand-off."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.transfer import room_from_transfer_id
from tests.engines.engine import LOCAL, SGLANG_PYTHON, Engine, Request, Sglang, another, engine_arguments
from tests.engines.model import Case, Reference
from tests.engines.stages import pages_at
from tests.engines.vllm_engine import BLOCK, CONNECTOR, VllmEngine, vllm_arguments
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.timeout(700),
    pytest.mark.skipif(
        not SGLANG_PYTHON.exists(), reason="SGLang's environment is not here: `.ci/setup sglang` makes it"
    ),
]


class SglangToVllm:
    """A router in front of both: what each engine wants to be asked, of one hand-off."""

    def __init__(self, folder: Path, model: Path, *, prefill_tp: int = 1) -> None:
        self.port = free_port()
        self._draw = random.Random(5)
        prefill = {
            **engine_arguments(model, prefill_tp),
            "page_size": BLOCK,
            "chunked_prefill_size": 64,
            "port": free_port(),
            "disaggregation_mode": "prefill",
            "disaggregation_transfer_backend": "kvgrpc",
            "disaggregation_bootstrap_port": self.port,
        }
        transfer = {**CONNECTOR, "kv_role": "kv_consumer", "engine_id": "decode"}
        self.prefill: Engine = Sglang("prefill", folder, prefill)
        self.decode: Engine = VllmEngine("decode", folder, {**vllm_arguments(model, 1), "kv_transfer_config": transfer})

    def wait_ready(self) -> SglangToVllm:
        self.prefill.wait_ready()
        self.prefill.stop()  # its scheduler polls without a pause
        try:
            self.decode.wait_ready()
        finally:
            self.prefill.go_on()
        return self

    def submit(self, case: Case) -> tuple[Request, Request, int]:
        """Decode is told another prompt. The third is their room."""
        transfer_id = f"xfer-{self._draw.randrange(1 << 60)}"
        room = room_from_transfer_id(transfer_id)
        at_prefill: dict[str, Any] = {
            "bootstrap_host": LOCAL,
            "bootstrap_port": self.port,
            "bootstrap_room": room,
        }
        at_decode = {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": f"http://{LOCAL}:{self.port}",
        }
        return (
            self.prefill.generate(case.prompt, 1, **at_prefill),
            self.decode.generate(another(case.prompt), len(case.tokens), **at_decode),
            room,
        )

    def close(self) -> None:
        threads = [threading.Thread(target=engine.close) for engine in (self.prefill, self.decode)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module", params=[1, 2], ids=["1 to 1", "2 to 1"])
def pair(folder: Path, reference: Reference, request: pytest.FixtureRequest) -> Iterator[SglangToVllm]:
    pair = SglangToVllm(folder, reference.path, prefill_tp=request.param)
    try:
        yield pair.wait_ready()
    finally:
        pair.close()


@pytest.mark.parametrize("length", [3, BLOCK, BLOCK + 1, 100, 300], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: SglangToVllm, reference: Reference, length: int) -> None:
    case = reference.case(length)
    prefill, decode, _ = pair.submit(case)
    assert decode.result() == case.tokens
    assert prefill.result() == case.tokens[:1]
    # It was handed over, and not computed at decode.
    assert "kvgrpc: hand-off of request" not in pair.decode.log()


def test_decode_takes_only_what_it_does_not_hold(pair: SglangToVllm, reference: Reference) -> None:
    first = reference.case(6 * BLOCK)
    assert pair.submit(first)[1].result() == first.tokens
    second = reference.case(8 * BLOCK + 3, prefix=first.prompt[: 4 * BLOCK])
    prefill, decode, room = pair.submit(second)
    assert decode.result() == second.tokens
    assert prefill.result() == second.tokens[:1]
    assert pages_at(pair.decode, room) == 9 - 4
    assert pair.prefill.is_empty() and pair.decode.is_empty()
