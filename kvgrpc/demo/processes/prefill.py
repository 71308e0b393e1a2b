"""The prefill process: computes prompts chunk by chunk, and sends the pages of each chunk as soon as they are there."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from kvgrpc.demo.engine.config import PREFILL
from kvgrpc.demo.engine.engine import Run
from kvgrpc.demo.engine.page_allocator import OutOfPages
from kvgrpc.demo.processes.child import Router
from kvgrpc.demo.processes.rank import EngineRank, serve
from kvgrpc.demo.protocol import Compute, Prefilled
from kvgrpc.model import Role
from kvgrpc.transfer import Align, KVPoll, KVSender
from kvgrpc.transfer.runtime.prefill_manager import PrefillManager


def main(router: Router) -> None:
    serve("prefill", Role.PREFILL, PREFILL, router, PrefillScheduler)


@dataclass(slots=True, eq=False)
class _Job:
    """A request with its pages, from admission until nothing reads them any more."""

    request: Compute
    sender: KVSender
    run: Run
    aux_row: int
    compute_seconds: float = 0.0
    sent_at: float = 0.0


class PrefillScheduler:
    """First come, first computed; who finds no free pages waits for those before it to be sent."""

    def __init__(self, opened: EngineRank) -> None:
        assert isinstance(opened.rank.transfer, PrefillManager)
        self._manager = opened.rank.transfer
        self._opened = opened
        self._engine = opened.engine
        self._waiting: deque[tuple[Compute, KVSender]] = deque()
        self._computing: _Job | None = None
        self._sending: list[_Job] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._computing or self._sending)

    def accept(self, request: Compute) -> None:
        # The sender is made at once, so that a decode which asks meanwhile finds the room.
        self._waiting.append((request, KVSender(self._manager, request.bootstrap_addr, request.room)))

    def step(self) -> bool:
        for job in list(self._sending):
            self._look_after(job)
        if self._computing is None and self._waiting and self._opened.aux.free:
            self._computing = self._admit(*self._waiting[0])
        if self._computing is None:
            return False
        self._compute(self._computing)
        return True

    def _admit(self, request: Compute, sender: KVSender) -> _Job | None:
        try:
            run = self._engine.admit_to_compute(request.prompt)
        except OutOfPages:
            return None
        self._waiting.popleft()
        job = _Job(request, sender, run, self._opened.aux.take())
        # The whole prompt is sent; a decode that has its beginning already asks for the last pages only.
        sender.init(self._engine.config.pages_for(len(run.prompt)), job.aux_row, Align.TAIL)
        if run.reused:
            self._send(job, 0, run.reused, is_last=False)
        return job

    def _compute(self, job: _Job) -> None:
        began, first_page = time.monotonic(), job.run.computed // self._engine.config.page_tokens
        token = self._engine.compute_chunk(job.run)
        self._engine.keep(job.run)
        job.compute_seconds += time.monotonic() - began
        done = job.run.prompt_computed
        if done:
            self._opened.aux.write(job.aux_row, job.request.room, token, len(job.run.prompt))
        self._send(job, first_page, self._engine.config.pages_for(job.run.computed), is_last=done)
        if done or job.sender.poll() is KVPoll.Failed:
            self._computing = None
            self._sending.append(job)

    def _send(self, job: _Job, start: int, stop: int, *, is_last: bool) -> None:
        job.sent_at = time.monotonic()
        job.sender.send(np.array(job.run.pages[start:stop], dtype=np.int32), slice(start, stop), is_last)

    def _look_after(self, job: _Job) -> None:
        poll = job.sender.poll()
        if poll not in (KVPoll.Success, KVPoll.Failed) or not job.sender.release_safe:
            return
        self._sending.remove(job)
        self._engine.release(job.run)
        self._opened.aux.release(job.aux_row)
        if poll is KVPoll.Failed:
            self._opened.fail(job.request.room, job.sender.failure)
        else:
            self._opened.router.tell(Prefilled(job.request.room, job.run.reused, job.compute_seconds, job.sent_at))
        job.sender.close()
