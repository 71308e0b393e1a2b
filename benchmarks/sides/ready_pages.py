"""Pairs whose prefill computes nothing and has the pages of every prompt before it is asked, so that what a hand-off
costs decode is not hidden behind a model. The first token of each is 0, and its pages hold nothing."""

from __future__ import annotations

from tests.engines.engine import Engine, Pair
from tests.engines.vllm_engine import VllmEngine, VllmPair


class SglangPrefill(Engine):
    worker = "benchmarks.sides.sglang_ready_pages"


class VllmPrefill(VllmEngine):
    worker = "benchmarks.sides.vllm_ready_pages"


class FedSglang(Pair):
    prefill_engine = SglangPrefill


class FedVllm(VllmPair):
    prefill_engine = VllmPrefill


# By the engine that decodes.
FED = {"sglang": FedSglang, "vllm": FedVllm}
