"""The model that an engine runs, as every adapter says it to the other side. Pure."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from kvgrpc.model import Attention, ModelIdentity

MODEL_NAME = "KVGRPC_MODEL_NAME"
# Hugging Face's cache: …/models--ORGANISATION--NAME/snapshots/REVISION
_SNAPSHOT = re.compile(r"/models--(?:[^/]+--)?([^/]+)/snapshots/([^/]+)/?$")
_DTYPES = {
    "bf16": "bfloat16",
    "half": "float16",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def identity(
    path: str, revision: str | None, cache_dtype: str, model_dtype: object, mla: bool, name: str = ""
) -> ModelIdentity:
    """The identity of the model at ``path``: a name of the Hub, or a folder, which may lie elsewhere at the other side.

    So of both the last word counts, with the revision where one is known. ``name``: the operator's, instead of it.
    ``cache_dtype``: as the engine calls it, "auto" for the model's own; ``model_dtype``: torch's.
    """
    found = _SNAPSHOT.search(path)
    last = found[1] if found else PurePosixPath(path).name
    return ModelIdentity(
        name=name or last,
        revision=revision or (found[2] if found else ""),
        cache_dtype=dtype_name(cache_dtype, model_dtype),
        attention=Attention.MLA if mla else Attention.MHA,
    )


def dtype_name(cache_dtype: str, model_dtype: object) -> str:
    """The name that torch has for it, where engines have names of their own for it: "bfloat16", "float8_e4m3fn"."""
    if cache_dtype == "auto":
        return str(model_dtype).removeprefix("torch.")
    return _DTYPES.get(cache_dtype, cache_dtype)
