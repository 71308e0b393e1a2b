"""Questions to an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgrpc.v1 import index_service_pb2 as pb


def question(*, model: str = "", engines: Sequence[str] = (), most: int = 0, **prefix: Any) -> pb.ScoreRequest:
    """Of one prompt: ``hashes``, ``sglang`` or ``vllm``."""
    if "hashes" in prefix:
        prefix["block_hashes"] = pb.BlockHashes(values=prefix.pop("hashes"))
    prompt = pb.ScorePrompt(model=model, **prefix)
    return pb.ScoreRequest(prompts=[prompt], engines=engines, max_scores=most, with_freshness=True)
