"""Pairs whose prefill computes nothing and has the pages of every prompt before it is asked, so that what a hand-off
costs decode is not hidden behind a model. vLLM's pair is still one of real engines."""

from __future__ import annotations

from tests.engines.engine import Engine, Pair
from tests.engines.vllm_engine import VllmPair


class SglangPrefill(Engine):
    worker = "benchmarks.sides.sglang_ready_pages"


class FedSglang(Pair):
    prefill_engine = SglangPrefill


# By the engine that decodes.
FED = {"sglang": FedSglang, "vllm": VllmPair}
