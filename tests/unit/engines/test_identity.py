"""Which model an engine runs, as both sides compare it."""

from __future__ import annotations

import pytest

from kvgrpc.engines.identity import dtype_name, identity
from kvgrpc.model import Attention, ModelIdentity

SNAPSHOT = "/caches/huggingface/hub/models--meta-llama--Llama-3-8B/snapshots/0123abcd"


@pytest.mark.parametrize(
    "path", ["meta-llama/Llama-3-8B", "/models/Llama-3-8B", "/other/place/Llama-3-8B/", "Llama-3-8B", SNAPSHOT]
)
def test_one_model_has_one_name_wherever_it_lies(path: str) -> None:
    assert identity(path, None, "auto", "torch.bfloat16", mla=False).name == "Llama-3-8B"


def test_a_revision_is_the_one_that_was_asked_for_or_that_of_the_snapshot() -> None:
    assert identity(SNAPSHOT, None, "auto", "torch.bfloat16", mla=False).revision == "0123abcd"
    assert identity("org/name", "main", "auto", "torch.bfloat16", mla=False).revision == "main"
    assert identity("org/name", None, "auto", "torch.bfloat16", mla=False).revision == ""


def test_an_operator_may_name_the_model() -> None:
    found = identity("/a/b", "r", "fp8", "torch.bfloat16", mla=True, name="ours")
    assert found == ModelIdentity("ours", "r", "float8_e4m3fn", Attention.MLA)


@pytest.mark.parametrize(
    ("said", "name"),
    [("auto", "float16"), ("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp8_e5m2", "float8_e5m2"), ("x", "x")],
)
def test_dtypes_have_torchs_names(said: str, name: str) -> None:
    assert dtype_name(said, "torch.float16") == name
