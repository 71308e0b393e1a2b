"""Proxies of two steps (vLLM's toy proxy for NIXL, llm-d's ``nixlv2``, production-stack): they ask prefill, wait, and
give decode what prefill answered, as it is. Here with engines of ``kv_both``, as llm-d starts them, on either side.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.engines.vllm.scheduler import UNUSED
from tests.engines.engine import Engine
from tests.engines.model import Case, Reference
from tests.engines.vllm_engine import BLOCK, CONNECTOR, VllmEngine, VllmPair
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
# What the toy proxy asks prefill.
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[VllmPair]:
    """One of the two inside MultiConnector, beside a connector of vLLM's own; each gives and takes, see ``sides``."""
    store = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "store-two-step")},
    }
    ours = {**CONNECTOR, "kv_role": "kv_both"}
    inside = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [ours, store]}}
    other_port = {"kv_connector_extra_config": {"bootstrap_port": free_port()}}
    pair = VllmPair(
        folder,
        reference.path,
        transfer={},
        prefill={"disable_log_stats": False, "transfer": {**inside, "kv_role": "kv_both"}},
        decode={"disable_log_stats": False, "transfer": {**ours, **other_port}},
    )
    pair.wait_ready()
    yield pair
    pair.close()


@pytest.fixture(params=["prefill", "decode"])
def sides(request: pytest.FixtureRequest, pair: VllmPair) -> tuple[VllmEngine, VllmEngine]:
    """Who computes prompts, and who decodes; the parameter is which of them is inside MultiConnector."""
    return (pair.prefill, pair.decode) if request.param == "prefill" else (pair.decode, pair.prefill)


def through(first: Engine, second: Engine, case: Case, other: Case) -> None:
    """As the proxy does it, but that the second engine is told another prompt with the same last token: it has
    the tokens of the first one's prompt only where it computed nothing of its own but for that token.
    """
    prefill = first.generate(case.prompt, 1, **ASKED)
    prefill.result()
    assert prefill.value is not None, first.log_tail()
    told = [*other.prompt[:-1], case.prompt[-1]]
    decode = second.generate(told, len(case.tokens), **prefill.value)
    assert decode.result() == case.tokens
    assert decode.value is None


@pytest.mark.parametrize("length", [3, BLOCK, 100, 300])
def test_decode_uses_what_prefill_computed(
    sides: tuple[VllmEngine, VllmEngine], reference: Reference, length: int
) -> None:
    first, second = sides
    through(first, second, reference.case(length), reference.case(length))
    assert first.is_empty() and second.is_empty()


@pytest.mark.parametrize("samples", [2, 5])
def test_parallel_samples_take_the_prompt_once(
    sides: tuple[VllmEngine, VllmEngine], reference: Reference, samples: int
) -> None:
    """Decode is told another prompt, but for the last block: who computed it would have other tokens."""
    first, second = sides
    case = reference.case(3 * BLOCK + 5)
    told = [*reference.case(3 * BLOCK).prompt, *case.prompt[3 * BLOCK :]]
    prefill = first.generate_samples(case.prompt, 1, samples, **ASKED)
    prefill.result()
    decode = second.generate_samples(told, len(case.tokens), samples, **prefill.value["answered"])
    decode.result()
    assert decode.value["tokens"] == [case.tokens] * samples
    assert first.is_empty() and second.is_empty()


def test_who_cannot_use_its_prefill_is_told(sides: tuple[VllmEngine, VllmEngine], reference: Reference) -> None:
    """What another connector's prefill answers."""
    (_, engine), case = sides, reference.case(100)
    before = engine.counted("vllm:kvgrpc_prefills_unused")
    foreign = {**ASKED, "do_remote_decode": False, "do_remote_prefill": True, "remote_block_ids": [[1, 2, 3, 4]]}
    decode = engine.generate(case.prompt, len(case.tokens), **foreign)
    assert decode.result() == case.tokens
    assert list(decode.value) == [UNUSED] and "transfer_id, remote_bootstrap_addr" in decode.value[UNUSED]
    assert "does not use what prefill computed" in engine.log()
    wait_until(lambda: engine.counted("vllm:kvgrpc_prefills_unused", reason="parameters") == before + 1)
    assert engine.counted("vllm:kvgrpc_prefills_unused") == before + 1
    assert engine.is_empty()
