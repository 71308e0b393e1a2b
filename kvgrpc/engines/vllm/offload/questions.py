"""Questions of other threads to vLLM's tiers, answered under vLLM's lock."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from functools import partial
from typing import Any, TypeVar

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import ParentManager

from kvgrpc.engines.vllm.offload.promotion import NEAR
from kvgrpc.errors import PeerUnreachable, TooManyRequests

MAX_QUESTIONS = 256
KEYS_OF_A_QUESTION = 512
# After which the others wait for the next round: vLLM's scheduler waits meanwhile, and a round comes each millisecond.
ANSWERING_SECONDS = 0.001
_BEING_ANSWERED_SECONDS = 5.0
T = TypeVar("T")


class Questions:
    """Questions to vLLM's tiers by other threads, answered under vLLM's lock: each short, at most MAX_QUESTIONS."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._asked: deque[tuple[Callable[[ParentManager], Any], Future[Any]]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._asked)

    def ask(
        self, question: Callable[[ParentManager], T], timeout: float, give_back: Callable[[T], None] | None = None
    ) -> T:
        """``give_back`` gets an answer that came after the caller had left, for it may own what nobody else releases.

        Raises TooManyRequests, PeerUnreachable where the engine does not come to it in time.
        """
        answer: Future[T] = Future()
        with self._lock:
            if len(self._asked) >= MAX_QUESTIONS:
                raise TooManyRequests(
                    f"{MAX_QUESTIONS} questions wait for the engine",
                    metadata={"limit": MAX_QUESTIONS, "value": MAX_QUESTIONS + 1, "scope": "questions to the engine"},
                    retry_after=0.1,
                )
            self._asked.append((question, answer))
        self._wake()
        try:
            return answer.result(timeout)
        except NotInTime:
            if not answer.cancel():
                with contextlib.suppress(NotInTime):
                    return answer.result(_BEING_ANSWERED_SECONDS)
                if give_back is not None:
                    answer.add_done_callback(partial(_give_back, give_back))
            text = f"the engine did not come to the question in {timeout:.1f} s"
            raise PeerUnreachable(text, metadata={"address": "the engine core"}) from None

    def leading_in_host(self, keys: Sequence[OffloadKey], timeout: float) -> int:
        """Leading chunks that the host has; in parts, since vLLM waits while one is answered. Raises as ``ask``."""
        end, found = time.monotonic() + timeout, 0
        while found < len(keys):
            part = keys[found : found + KEYS_OF_A_QUESTION]
            here = self.ask(partial(leading_in_host, keys=part), max(0.0, end - time.monotonic()))
            found += here
            if here < len(part):
                break
        return found

    def present_in_host(self, keys: Sequence[OffloadKey], timeout: float) -> list[bool]:
        """Returns which of them the host has, of KEYS_OF_A_QUESTION at most. Raises as ``ask``."""
        return self.ask(partial(present_in_host, keys=keys), timeout)

    def answer(self, parent: ParentManager) -> None:
        """Those that wait now, in their order, as far as there is time."""
        end = time.monotonic() + ANSWERING_SECONDS
        for _ in range(len(self._asked)):
            question, answer = self._asked.popleft()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(question(parent))
            except Exception as error:
                answer.set_exception(error)
            if time.monotonic() >= end:
                return


def _give_back(give_back: Callable[[Any], None], answer: Future[Any]) -> None:
    if answer.exception() is None:
        give_back(answer.result())


@contextlib.contextmanager
def looking(parent: ParentManager) -> Iterator[Callable[[OffloadKey], LookupResult]]:
    """Yields what the host says of a chunk; nothing is promoted for it."""
    context = ReqContext(req_id="kvgrpc-look", load_tier_filter=NEAR)
    parent.on_new_request(context)
    try:
        yield lambda key: parent.lookup(key, context)
    finally:
        parent.on_request_finished(context)


def leading_in_host(parent: ParentManager, keys: Sequence[OffloadKey]) -> int:
    with looking(parent) as look:
        return next((number for number, key in enumerate(keys) if look(key) is not LookupResult.HIT), len(keys))


def present_in_host(parent: ParentManager, keys: Sequence[OffloadKey]) -> list[bool]:
    with looking(parent) as look:
        return [look(key) is LookupResult.HIT for key in keys]
