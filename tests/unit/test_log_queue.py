"""The log's queue: nobody waits for whoever writes, and what is lost is counted and told."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvgrpc.observability.log_queue import LogQueue
from tests.support.waiting import wait_until

_log = logging.getLogger("kvgrpc.tests")


class Pipe(logging.Handler):
    """A handler that stands still while ``reads`` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.reads.wait(30.0)
        self.lines.append(self.format(record))


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    logging.getLogger().addHandler(pipe)
    yield pipe
    pipe.reads.set()
    logging.getLogger().removeHandler(pipe)


@pytest.fixture
def lines(pipe: Pipe) -> Iterator[LogQueue]:
    lines = LogQueue(limit=10)
    lines.start()
    yield lines
    pipe.reads.set()
    assert lines.stop(30.0)


def test_nobody_waits_for_a_log_that_is_not_written_and_what_is_dropped_is_told(lines: LogQueue, pipe: Pipe) -> None:
    for number in range(100):
        _log.warning("line %d", number)
    assert not lines.stop(0.01), "what waits is not forgotten either"
    assert lines.dropped >= 89
    pipe.reads.set()
    dropped = lines.dropped
    wait_until(lambda: any("dropped" in line for line in pipe.lines))
    told = f"{dropped} lines were dropped: 10 waited for a log that was not written"
    assert [line for line in pipe.lines if "dropped" in line] == [told]
    assert pipe.lines[0] == "line 0" and len(pipe.lines) == 100 - dropped + 1


def test_a_record_says_what_was_so_when_it_was_logged(lines: LogQueue, pipe: Pipe) -> None:
    pages = [1]
    try:
        raise ValueError("of a page")
    except ValueError:
        _log.exception("pages %s", pages)
    pages.append(2)
    pipe.reads.set()
    wait_until(lambda: bool(pipe.lines))
    assert pipe.lines[0].startswith("pages [1]\nTraceback") and pipe.lines[0].endswith("ValueError: of a page")


def test_a_handler_that_raises_ends_no_log(lines: LogQueue, pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe.reads.set()
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with monkeypatch.context() as broken:
        broken.setattr(pipe, "handle", lambda record: 1 // 0)
        _log.warning("lost")
        assert lines.stop(30.0)
        lines.start()
    _log.warning("said")
    wait_until(lambda: pipe.lines == ["said"])


def test_records_of_a_forked_child_go_their_own_way() -> None:
    code = (
        "import logging, os\n"
        "from kvgrpc.rpc.loop import LoopThread\n"
        "logging.basicConfig(format='%(message)s')\n"
        "LoopThread.shared()\n"
        "child = os.fork()\n"
        "if child: os.waitpid(child, 0)\n"
        "else: logging.getLogger('kvgrpc.x').warning('of the child'); os._exit(0)\n"
        "logging.getLogger('kvgrpc.x').warning('of the parent')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": "."}
    )
    assert (done.returncode, done.stderr) == (0, "of the child\nof the parent\n"), done


def test_a_full_pipe_stops_no_loop() -> None:
    """As of a process whose stderr nobody reads."""
    code = (
        "import asyncio, logging\n"
        "from kvgrpc.rpc.loop import LoopThread\n"
        "logging.basicConfig(format='%(message)s')\n"
        "async def log():\n"
        "    for _ in range(2000): logging.getLogger('kvgrpc.x').warning('x' * 1000)\n"
        "    return 'the loop turns'\n"
        "print(LoopThread.shared().run(log(), 10.0), flush=True)\n"
        "import os; os._exit(0)\n"
    )
    read, write = os.pipe()
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=write, text=True, timeout=60)
        assert done.stdout == "the loop turns\n"
    finally:
        os.close(read)
        os.close(write)


def test_a_line_that_cannot_be_said_is_nobodys_failure(
    lines: LogQueue, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged where something failed already, by a thread that must go on."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("it cannot say what it is")

    monkeypatch.setattr(logging, "raiseExceptions", False)
    pipe.reads.set()
    _log.error("failed: %s", Mute())
    _log.error("%d pages", "many")
    _log.error("goes on")
    wait_until(lambda: pipe.lines == ["goes on"])


def test_a_forked_child_ends_without_waiting_for_a_thread_that_it_has_not() -> None:
    code = (
        "import os, sys, time\n"
        "from kvgrpc.observability import log_queue\n"
        "lines = log_queue.log_queue\n"
        "lines.start()\n"
        "child = os.fork()\n"
        "if not child: os._exit(0 if lines.stop(30.0) else 1)\n"
        "began = time.monotonic()\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), time.monotonic() - began < 15.0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": "."}
    )
    assert (done.stdout, done.stderr) == ("0 True\n", ""), done
