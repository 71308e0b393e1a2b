"""vLLM's host memory as other engines borrow from it: its chunks are pinned for no longer than they are copied."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import ParentManager, TransferJob

from kvgrpc.engines.vllm.offload.keys import ChunkNames
from kvgrpc.engines.vllm.offload.promotion import NEAR
from kvgrpc.engines.vllm.offload.questions import Questions
from kvgrpc.prefetch.storage.base import PageBuffers

_ANSWER_SECONDS = 2.0
_numbers = itertools.count()


class LentChunks:
    """A HostCache for a Lender. ``done`` hears of vLLM's job for what was pinned, on the thread that copied it."""

    def __init__(
        self,
        questions: Questions,
        names: ChunkNames,
        address: int,
        chunk_bytes: int,
        done: Callable[[TransferJob], None],
    ) -> None:
        self._questions, self._names = questions, names
        self._address, self._chunk_bytes = address, chunk_bytes
        self._done = done
        self._loans = 0
        self._changed = threading.Condition()

    def count(self, hashes: Sequence[str]) -> int:
        """A stranger's question: nothing is promoted for it."""
        return self._questions.leading_in_host(self._names.keys(hashes), _ANSWER_SECONDS)

    @contextlib.contextmanager
    def reading(self, hashes: Sequence[str], first: int = 0) -> Iterator[Sequence[int]]:
        pin = partial(self._pin, keys=self._names.keys(hashes[first:]))
        job = self._questions.ask(pin, _ANSWER_SECONDS, self._let_go)
        try:
            yield () if job is None else [int(chunk) for chunk in job.chunk_ids]
        finally:
            self._let_go(job)

    def buffers(self, page: int) -> PageBuffers:
        return ((self._address + page * self._chunk_bytes, self._chunk_bytes),)

    def wait_idle(self, seconds: float) -> bool:
        """True if nothing is copied any more. Under vLLM's lock, where nothing new begins."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._loans, seconds)

    def _pin(self, parent: ParentManager, keys: Sequence[OffloadKey]) -> TransferJob | None:
        context = ReqContext(req_id=f"kvgrpc-lend-{next(_numbers)}", load_tier_filter=NEAR)
        parent.on_new_request(context)
        job: TransferJob | None = None
        try:
            here = list(itertools.takewhile(lambda key: parent.lookup(key, context) is LookupResult.HIT, keys))
            if here:
                job = parent.create_store_job(here, context)
                with self._changed:
                    self._loans += 1
        finally:
            try:
                parent.on_request_finished(context)
            except BaseException:  # nobody gets the job then
                self._let_go(job)
                raise
        return job

    def _let_go(self, job: TransferJob | None) -> None:
        if job is None:
            return
        self._done(job)
        with self._changed:
            self._loans -= 1
            self._changed.notify_all()
