"""The reference: the same prompts in one process, from prompt to answer, without kvgrpc and without a prefix cache."""

from __future__ import annotations

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


def _answer(engine: DemoEngine, router: Router, request: Compute) -> None:
    run = engine.admit(request.prompt, request.answer_tokens)
    while not run.prompt_computed:
        token = engine.compute_chunk(run)
    digest = engine.memory.digest(run.pages, len(run.prompt))
    router.tell(AnswerToken(request.room, token))
    for _ in range(request.answer_tokens - 1):
        token = engine.compute_token(run, token)
        router.tell(AnswerToken(request.room, token))
    engine.release(run)
    router.tell(Finished(request.room, digest))
