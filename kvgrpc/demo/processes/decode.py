"""The decode process: receives the KV cache of prompts and generates the answers, one token of each in turn."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from kvgrpc.demo.engine.config import DECODE
from kvgrpc.demo.engine.engine import Run
from kvgrpc.demo.engine.page_allocator import OutOfPages
from kvgrpc.demo.processes.child import Router
from kvgrpc.demo.processes.rank import EngineRank, serve
from kvgrpc.demo.protocol import AnswerToken, Compute, Finished, Received
from kvgrpc.errors import Failure, Reason
from kvgrpc.model import Role
from kvgrpc.transfer import KVPoll, KVReceiver
from kvgrpc.transfer.runtime.decode_manager import DecodeManager


def main(router: Router) -> None:
    serve("decode", Role.DECODE, DECODE, router, DecodeScheduler)


@dataclass(slots=True, eq=False)
class _Job:
    """A request. It has pages from the moment at which the receiver wants them until they may be reused."""

    request: Compute
    receiver: KVReceiver
    run: Run | None = None
    aux_row: int = -1
    token: int = -1
    told: int = 0


class DecodeScheduler:
    """Every request that has its KV cache gets one token per step; the others are polled."""

    def __init__(self, opened: EngineRank) -> None:
        assert isinstance(opened.rank.transfer, DecodeManager)
        self._manager = opened.rank.transfer
        self._opened = opened
        self._engine = opened.engine
        self._receiving: list[_Job] = []
        self._generating: list[_Job] = []
        self._held: list[_Job] = []

    @property
    def busy(self) -> bool:
        return bool(self._receiving or self._generating or self._held)

    def accept(self, request: Compute) -> None:
        self._receiving.append(_Job(request, KVReceiver(self._manager, request.bootstrap_addr, request.room)))

    def step(self) -> bool:
        for job in list(self._receiving):
            self._look_after(job)
        for job in list(self._held):
            if job.receiver.release_safe:
                self._held.remove(job)
                self._release(job)
        for job in list(self._generating):
            self._generate(job)
        return bool(self._generating)

    def _look_after(self, job: _Job) -> None:
        poll = job.receiver.poll()
        if poll is KVPoll.WaitingForInput and job.run is None:
            self._ask_for(job)
        elif poll is KVPoll.Success and job.run is not None:
            self._receiving.remove(job)
            self._take(job, job.run)
        elif poll is KVPoll.Failed:
            self._receiving.remove(job)
            self._give_up(job, job.receiver.failure)

    def _ask_for(self, job: _Job) -> None:
        if not self._opened.aux.free:
            return
        prompt = job.request.prompt
        try:
            run = self._engine.admit_to_receive(prompt, job.request.answer_tokens)
        except OutOfPages:
            return
        job.run, job.aux_row = run, self._opened.aux.take()
        missing = run.pages[run.reused : self._engine.config.pages_for(len(prompt))]
        job.receiver.init(np.array(missing, dtype=np.int32), job.aux_row, first_page=run.reused)

    def _take(self, job: _Job, run: Run) -> None:
        received_at = time.monotonic()
        prompt_pages = self._engine.config.pages_for(len(run.prompt))
        room, first_token, tokens = self._opened.aux.read(job.aux_row)
        if (room, tokens) != (job.request.room, len(run.prompt)):
            text = f"aux says room {room} and {tokens} tokens, not {job.request.room} and {len(run.prompt)}"
            return self._give_up(job, Failure(Reason.INTERNAL, text, {"requestId": str(job.request.room)}))
        self._engine.received(run)
        self._engine.keep(run)
        digest = self._engine.memory.digest(run.pages, len(run.prompt))
        moved = prompt_pages - run.reused
        self._opened.router.tell(Received(job.request.room, moved, run.reused, received_at, digest))
        self._tell(job, first_token)

    def _generate(self, job: _Job) -> None:
        assert job.run is not None
        self._tell(job, self._engine.compute_token(job.run, job.token))

    def _tell(self, job: _Job, token: int) -> None:
        if job not in self._generating:
            self._generating.append(job)
        job.token, job.told = token, job.told + 1
        self._opened.router.tell(AnswerToken(job.request.room, token))
        if job.told == job.request.answer_tokens:
            self._generating.remove(job)
            self._release(job)
            self._opened.router.tell(Finished(job.request.room))

    def _give_up(self, job: _Job, failure: Failure | None) -> None:
        self._opened.fail(job.request.room, failure)
        self._held.append(job)

    def _release(self, job: _Job) -> None:
        if job.run is not None:
            self._engine.release(job.run)
            self._opened.aux.release(job.aux_row)
            job.run = None
        job.receiver.close()
