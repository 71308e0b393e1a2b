"""The one asyncio loop of a process, in a daemon thread of its own: everything of grpc.aio lives on it.

Engine threads never wait for it: they append to something of theirs and wake it with ``loop.call_soon_threadsafe``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from kvgrpc.observability.log_queue import log_queue
from kvgrpc.observability.logging import drop_poller_noise
from kvgrpc.rpc.waking import WatchedSelector

LAG_INTERVAL = 0.25
STUCK_AFTER = 5.0

_log = logging.getLogger(__name__)
T = TypeVar("T")


class LoopThread:
    """An asyncio loop that runs in a daemon thread from construction to ``close``. All methods are thread-safe.

    Use ``LoopThread.shared()``; objects of grpc.aio may only be used on the loop that they were made on. After a fork
    every method raises RuntimeError: neither the thread nor gRPC survives one.
    """

    _shared: ClassVar[LoopThread | None] = None
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()
    _of_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopThread]] = weakref.WeakKeyDictionary()

    def __init__(self, name: str = "kvgrpc-loop") -> None:
        self._pid = os.getpid()
        self._selector = WatchedSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failures: list[str] = []
        self._lag = 0.0
        self._last_tick = time.monotonic()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        self._started.wait()

    @classmethod
    def shared(cls) -> LoopThread:
        """The loop of this process, started at the first call and never closed."""
        shared = cls._shared
        if shared is None:
            with cls._shared_lock:
                if cls._shared is None:
                    log_queue.start()  # the loop stands still while it logs
                    cls._shared = cls()
                shared = cls._shared
        shared._check_process()
        return shared

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop itself, for ``call_soon_threadsafe`` and ``time``."""
        self._check_process()
        return self._loop

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Runs it on the loop and waits for the result, at most ``timeout`` seconds; for other threads only.

        Raises what the coroutine raises, TimeoutError (the coroutine is cancelled then), and RuntimeError on the loop's
        own thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("LoopThread.run was called on the loop thread itself: await the coroutine there")
        future = self._submit(coroutine)
        try:
            return future.result(min(timeout, threading.TIMEOUT_MAX))
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise TimeoutError(f"no result within {timeout:g} s") from None

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> concurrent.futures.Future[T]:
        """Starts a supervised task, from any thread, the loop's own included; cancel it through the future.

        An exception that escapes it is a bug: it is logged once, counted, and makes ``healthy`` False for good.
        """
        try:
            return self._submit(self._supervise(coroutine, name))
        except RuntimeError:
            coroutine.close()
            raise

    def task(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Returns a supervised task; ``spawn`` for what runs on the loop already."""
        task = self._loop.create_task(coroutine, name=name)
        # The loop itself keeps only weak references to its tasks.
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    @property
    def healthy(self) -> bool:
        """False once a supervised task has failed, the thread has ended, or while the loop is stuck for 5 s."""
        return not self.trouble

    @property
    def trouble(self) -> str:
        """Why it is not healthy; empty while it is. A turn that was late is over: only the lateness now counts."""
        if self._failures:
            return f"the background task {self._failures[0]} failed"
        if not self._thread.is_alive():
            return "its thread has ended"
        late = time.monotonic() - self._last_tick - LAG_INTERVAL
        return f"the event loop has not turned for {late:.1f} s" if late >= STUCK_AFTER else ""

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of the supervised tasks that failed, oldest first; at most 100."""
        return tuple(self._failures)

    @property
    def lag(self) -> float:
        """Seconds by which the loop last woke too late, or is late now."""
        return max(self._lag, time.monotonic() - self._last_tick - LAG_INTERVAL)

    @property
    def work_waits(self) -> bool:
        """True if the loop's thread waits for the interpreter, on which another thread is; never on its own thread."""
        return self._selector.work_waits and threading.get_ident() != self._thread.ident

    @property
    def turns(self) -> int:
        """A number that moves whenever the loop's thread has the interpreter."""
        return self._selector.turns

    def close(self, timeout: float = 5.0) -> None:
        """Cancels all tasks, stops the loop and ends the thread; for loops that are not shared, in tests."""
        self._check_process()
        if threading.current_thread() is self._thread:
            raise RuntimeError("LoopThread.close was called on the loop thread itself")
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"kvgrpc was started in process {self._pid} and this is its fork {os.getpid()}: gRPC does not survive "
                'a fork. Start processes with multiprocessing.get_context("spawn"), or open kvgrpc after the fork'
            )

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        try:
            self._check_process()
            if sys.is_finalizing():
                raise RuntimeError("Python is ending: daemon threads, the loop's among them, no longer run")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise

    async def _supervise(self, coroutine: Coroutine[Any, Any, T], name: str) -> T:
        task = asyncio.current_task()
        assert task is not None
        task.set_name(name)
        self._tasks.add(task)
        try:
            return await coroutine
        except Exception as error:
            self._record_failure(name, error)
            raise
        finally:
            self._tasks.discard(task)

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._record_failure(task.get_name(), error)

    def _record_failure(self, name: str, error: BaseException) -> None:
        _log.error("background task %s failed; this process is unhealthy from now on", name, exc_info=error)
        _count_failure(name)
        if len(self._failures) < 100:
            self._failures.append(name)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._of_loop[self._loop] = self
        drop_poller_noise()
        self._loop.call_soon(self._started.set)
        measuring = self._loop.create_task(self._measure_lag(), name="loop-lag")
        try:
            self._loop.run_forever()
        finally:
            measuring.cancel()
            self._cancel_all()
            self._loop.close()

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    async def _measure_lag(self) -> None:
        from kvgrpc.observability import metrics  # half of what a client would load

        while True:
            before = time.monotonic()
            await asyncio.sleep(LAG_INTERVAL)
            self._last_tick = time.monotonic()
            self._lag = max(0.0, self._last_tick - before - LAG_INTERVAL)
            metrics.LOOP_LAG_SECONDS.set(self._lag)
            metrics.LOOP_LATE_SECONDS.observe(self._lag)


def background(coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """A supervised task of the loop that runs now, for code that lives on any loop; cancel it to end it.

    On a ``LoopThread`` it is that one's ``task``. On a loop of the caller's own, too, an exception that escapes is
    logged once and counted (``kvgrpc_task_failures_total``).
    """
    loop = asyncio.get_running_loop()
    owner = LoopThread._of_loop.get(loop)
    if owner is not None:
        return owner.task(coroutine, name)
    task = loop.create_task(coroutine, name=name)
    _elsewhere.add(task)
    task.add_done_callback(_on_end_elsewhere)
    return task


_elsewhere: set[asyncio.Task[Any]] = set()


def _on_end_elsewhere(task: asyncio.Task[Any]) -> None:
    _elsewhere.discard(task)
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _log.error("background task %s failed", task.get_name(), exc_info=error)
        _count_failure(task.get_name())


def _count_failure(name: str) -> None:
    from kvgrpc.observability import metrics

    metrics.TASK_FAILURES.labels(name.split()[0]).inc()
