"""Requests to pairs of vLLM engines that speculate, and how many tokens of their drafts were right."""

from __future__ import annotations

from tests.engines.engine import Request
from tests.engines.model import Reference
from tests.engines.stages import handed_over
from tests.engines.vllm_engine import VllmPair

DRAFTS = 3
TOKENS = 17


def hand_over(pair: VllmPair, model: Reference, prompt: list[int], known: int = 0) -> tuple[Request, int, int]:
    """The request at decode, which is told another prompt but for the first ``known`` tokens and the last: it has the
    right tokens by prefill's pages alone. And how many tokens of drafts were right, and how many pages came."""
    room, before = pair.room(), pair.decode.accepted()
    prefill = pair.prefill.generate(prompt, 1, **pair.at_prefill(room))
    other = model.case(len(prompt), new_tokens=1).prompt
    decode = pair.decode.generate([*prompt[:known], *other[known:-1], prompt[-1]], TOKENS, **pair.at_decode(room))
    assert prefill.result() == decode.result()[:1]
    return decode, pair.decode.accepted() - before, handed_over(pair, room)


def accepted_alone(pair: VllmPair, prompt: list[int]) -> int:
    """How many tokens of drafts are right where one engine does it all."""
    assert pair.decode.is_empty()
    before = pair.decode.accepted()
    pair.decode.generate(prompt, TOKENS).result()
    return pair.decode.accepted() - before
