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
from tests.engines.vllm_engine import BLOCK, CONNECTOR, VllmPair
from tests.support.ports import free_port

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
    """One of the two inside MultiConnector, beside a connector of vLLM's own."""
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
        prefill={"transfer": {**inside, "kv_role": "kv_both"}},
        decode={"disable_log_stats": False, "transfer": {**ours, **other_port}},
    )
    pair.wait_ready()
    yield pair
    pair.close()


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
def test_decode_uses_what_prefill_computed(pair: VllmPair, reference: Reference, length: int) -> None:
    through(pair.prefill, pair.decode, reference.case(length), reference.case(length))
    assert pair.prefill.is_empty() and pair.decode.is_empty()


def test_an_engine_of_both_roles_serves_the_other_way_round_too(pair: VllmPair, reference: Reference) -> None:
    through(pair.decode, pair.prefill, reference.case(100), reference.case(100))
    assert pair.prefill.is_empty() and pair.decode.is_empty()


@pytest.mark.parametrize("samples", [2, 5])
def test_parallel_samples_take_the_prompt_once(pair: VllmPair, reference: Reference, samples: int) -> None:
    """Decode is told another prompt, but for the last block: who computed it would have other tokens."""
    case = reference.case(3 * BLOCK + 5)
    told = [*reference.case(3 * BLOCK).prompt, *case.prompt[3 * BLOCK :]]
    prefill = pair.prefill.generate_samples(case.prompt, 1, samples, **ASKED)
    prefill.result()
    decode = pair.decode.generate_samples(told, len(case.tokens), samples, **prefill.value["answered"])
    decode.result()
    assert decode.value["tokens"] == [case.tokens] * samples
    assert pair.prefill.is_empty() and pair.decode.is_empty()


def test_who_cannot_use_its_prefill_is_told(pair: VllmPair, reference: Reference) -> None:
    """What another connector's prefill answers."""
    case = reference.case(100)
    foreign = {**ASKED, "do_remote_decode": False, "do_remote_prefill": True, "remote_block_ids": [[1, 2, 3, 4]]}
    decode = pair.decode.generate(case.prompt, len(case.tokens), **foreign)
    assert decode.result() == case.tokens
    assert list(decode.value) == [UNUSED] and "transfer_id, remote_bootstrap_addr" in decode.value[UNUSED]
    assert "does not use what prefill computed" in pair.decode.log()
    assert pair.decode.is_empty()
