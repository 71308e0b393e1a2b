"""Processes of tests that start at once: copies of one that has loaded what they need, and has begun nothing.

To load it takes a second and more of a core, and the tests start hundreds. A copy is a process as any other one, to be
killed, stopped and looked at. Where a test changed the environment, which libraries read when they are loaded, it
begins from nothing.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

_LOADED = ["kvgrpc.server", "kvgrpc.dataplane.shm", "tests.support.rank_host", "tests.support.faults.dataplane"]
# Names the test that runs, which is nobody's business.
_NOT_READ = "PYTEST_CURRENT_TEST"
_environment: dict[str, str] = {}


def process_of(target: Callable[..., None], arguments: tuple[Any, ...]) -> BaseProcess:
    """A process that is to run this, and to die with its parent. It has not been started."""
    now = {name: value for name, value in os.environ.items() if name != _NOT_READ}
    if not _environment:
        _environment.update(now)
    if now != _environment:
        return multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    return context.Process(target=_elsewhere, args=(target, *arguments), daemon=True)


def _elsewhere(target: Callable[..., None], *arguments: Any) -> None:
    """What the copies allocate has different addresses, as in processes that were started one by one: a rank that took
    its own address for its peer's would not be noticed else."""
    moved = mmap.mmap(-1, mmap.PAGESIZE * (1 + os.getpid() % 8192))
    target(*arguments)
    moved.close()
