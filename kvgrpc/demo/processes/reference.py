"""The reference: the same prompts in one process, from prompt to answer, without kvgrpc and without a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from kvgrpc.demo.engine.config import PREFILL
from kvgrpc.demo.engine.engine import DemoEngine
from kvgrpc.demo.engine.paging import OwnMemory
from kvgrpc.demo.processes.child import Router, RouterGone
from kvgrpc.demo.protocol import AnswerToken, Compute, Finished, Loaded


def main(router: Router) -> None:
    engine = DemoEngine(PREFILL, OwnMemory())
    try:
        router.tell(Loaded())
        while True:
            message = router.receive()
            if isinstance(message, Compute):
                _answer(engine, router, message)
    except RouterGone:
        pass


def answer(engine: DemoEngine, prompt: Sequence[int], answer_tokens: int) -> tuple[list[int], str]:
    """The tokens after a prompt, and a digest of the prompt's KV cache."""
    run = engine.admit(prompt, answer_tokens)
    while not run.prompt_computed:
        token = engine.compute_chunk(run)
    digest = engine.memory.digest(run.pages, len(run.prompt))
    tokens = [token]
    while len(tokens) < answer_tokens:
        tokens.append(engine.compute_token(run, tokens[-1]))
    engine.release(run)
    return tokens, digest


def _answer(engine: DemoEngine, router: Router, request: Compute) -> None:
    tokens, digest = answer(engine, request.prompt, request.answer_tokens)
    for token in tokens:
        router.tell(AnswerToken(request.room, token))
    router.tell(Finished(request.room, digest))
