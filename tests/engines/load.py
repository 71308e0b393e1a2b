"""A machine that is loaded with fifty busy processes beside a pair of engines: no request is lost.

Both engines are asked the same; test_sglang_load.py and test_vllm_load.py run it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.engines.engine import Pair, Request
from tests.engines.model import Case, Reference

BUSY = 50
LOADED_SECONDS = 300.0
CLIENTS = 4
# Of one request on such a machine; below the 300 s after which its room's deadline ends it.
ANSWER_SECONDS = 280.0
# More tokens than seven pools have. The reference computes them before the load begins.
CASES = 200


@dataclass
class Served:
    """``slowest``: seconds from asking both sides until decode's last token."""

    requests: int = 0
    slowest: float = 0.0


def serve_under_load(pair: Pair, reference: Reference) -> None:
    """From when the engines are up until what was asked last is answered."""
    pair.check(reference)
    cases = [reference.case(length) for length in itertools.islice(itertools.cycle((40, 100, 200, 300)), CASES)]
    served, failures = Served(), list[str]()
    with _busy_processes(BUSY):
        end = time.monotonic() + LOADED_SECONDS

        def is_over() -> bool:
            return time.monotonic() > end

        threads = [
            threading.Thread(target=_ask_on, args=(pair, cases[number::CLIENTS], is_over, served, failures))
            for number in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LOADED_SECONDS + 2 * ANSWER_SECONDS)
        load = os.getloadavg()[0]
    silent = sum(engine.log().count("heard nothing of") for engine in (pair.prefill, pair.decode))
    print(f"load {load:.0f}: {served.requests} requests, slowest {served.slowest:.1f} s, {silent} times silent")
    assert not failures, "\n".join(failures)
    assert load > BUSY / 2, "the machine was not loaded"
    assert served.requests >= 2 * CLIENTS, "hardly a request was asked"
    for engine in (pair.prefill, pair.decode):
        assert engine.alive and "PEER_LOST" not in engine.log(), engine.log_tail()
    pair.check(reference)
    assert pair.prefill.is_empty() and pair.decode.is_empty()


@contextlib.contextmanager
def handing_over(pair: Pair, cases: list[Case]) -> Iterator[Served]:
    """Two clients ask for these prompts meanwhile, again and again. Raises AssertionError for one that went wrong."""
    served, failures, over = Served(), list[str](), threading.Event()
    threads = [
        threading.Thread(target=_ask_on, args=(pair, cases[number::2], over.is_set, served, failures))
        for number in range(2)
    ]
    for thread in threads:
        thread.start()
    try:
        yield served
    finally:
        over.set()
        for thread in threads:
            thread.join(ANSWER_SECONDS)
    assert not failures, "\n".join(failures)


def _ask_on(pair: Pair, cases: list[Case], is_over: Callable[[], bool], served: Served, failures: list[str]) -> None:
    """As one client: the next request once the last is answered, until the end or a failure. A case comes again long
    after the engines' pools have lost it."""
    for case in itertools.cycle(cases):
        if failures or is_over():
            return
        room, asked = pair.room(), time.monotonic()
        prefill, decode = pair.submit_unseen(case.prompt, len(case.tokens), room)
        wrong = _wrong(pair, room, prefill, case.tokens[:1]) or _wrong(pair, room, decode, case.tokens)
        if wrong:
            failures.append(f"request {served.requests} after {time.monotonic() - asked:.1f} s: {wrong}")
            return
        served.requests += 1
        served.slowest = max(served.slowest, time.monotonic() - asked)


def _wrong(pair: Pair, room: int, half: Request, tokens: list[int]) -> str:
    if not half.wait(ANSWER_SECONDS):
        return f"{half.engine.role} did not answer\n{half.engine.log_tail()}"
    if half.error is not None:
        return f"{half.engine.role}: {half.error} {pair.reason_of(half, room)}"
    return "" if half.tokens == tokens else f"{half.engine.role} answered {half.tokens} instead of {tokens}"


@contextlib.contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    """Each a session of its own, for the kernel shares the processor by session. They end with us or soon after."""
    busy = ["timeout", "-s", "KILL", str(int(2 * LOADED_SECONDS)), "sh", "-c", "while :; do :; done"]
    processes = [subprocess.Popen(busy, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()  # timeout passes it on
        for process in processes:
            process.wait(10)
