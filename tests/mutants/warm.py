"""The quick way: a process that has loaded the tests of a target and all they need, and forks once for each fault.

In the fork the function with the fault gets its code anew. That reaches no default of a parameter and nothing that ran
while the modules were loaded: such a fault is left to a process that loads the whole module with it.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType

import hypothesis
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st

from tests.mutants.faults import Mutant, site
from tests.mutants.targets import ROOT

PASSED, FAILED, HUNG, NOT_THIS_WAY = "passed", "failed", "hung", "not this way"
REMEMBERED = 12
# Of all tests without a fault, which notes every call.
LONGEST_SECONDS = 600.0
NOT_PATCHED = 77


class WarmTests:
    """A process that answers one question at a time: what do the tests say of this fault?"""

    def __init__(self, tests: Sequence[str], limit: float) -> None:
        asks, ask = os.pipe()
        answer, answers = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            be_silent()
            os.close(ask)
            os.close(answer)
            # Of one test; a fork has a limit of its own, and the first run, which notes every call, may take long.
            options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--timeout", str(LONGEST_SECONDS)]
            with tempfile.TemporaryDirectory() as folder:
                options += ["--basetemp", f"{folder}/tests"]
                pytest.main([*options, *tests], plugins=[_Answering(asks, answers, Path(folder) / "noted", limit)])
            os._exit(0)
        os.close(asks)
        os.close(answers)
        self._ask, self._answer = os.fdopen(ask, "w"), os.fdopen(answer)

    def verdict(self, mutant: Mutant | None) -> str:
        """Of the tests on one fault (None: on none)."""
        question = None if mutant is None else [str(mutant.path), mutant.number, mutant.line, mutant.kind, mutant.what]
        print(json.dumps(question), file=self._ask, flush=True)
        return self._answer.readline().strip() or FAILED

    def close(self) -> None:
        self._ask.close()
        os.waitpid(self._pid, 0)


def be_silent() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)


class _Answering:
    """A plugin of pytest that runs tests once for each question, in a fork: those that call the function with the
    fault, and first of them those that noticed the last faults, then the quickest. A failed property is not made
    smaller."""

    def __init__(self, asks: int, answers: int, noted: Path, limit: float) -> None:
        self._asks, self._answers = os.fdopen(asks), os.fdopen(answers, "w")
        self._noted = noted
        self._limit = limit
        self._cpu_seconds = 0
        self._seconds: dict[str, float] = {}
        self._calls: dict[str, list[tuple[str, int]]] = {}
        self._noticed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        settings.register_profile("mutants", settings(), phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        # Hypothesis reads tables and our modules when it first draws: here, and not in each fork.
        hypothesis.find(st.text(min_size=1) | st.integers(2), bool)
        for line in self._asks:
            question = json.loads(line)
            mutant = None if question is None else Mutant(Path(question[0]), *question[1:])
            print(self._verdict(session, mutant), file=self._answers, flush=True)
        return True

    def _verdict(self, session: pytest.Session, mutant: Mutant | None) -> str:
        self._noted.write_text("")
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            if self._cpu_seconds:
                resource.setrlimit(resource.RLIMIT_CPU, (self._cpu_seconds, self._cpu_seconds))
            try:
                os._exit(self._answer_of(session, mutant))
            except BaseException:  # a signal that nobody handles because of the fault: the fork must not go on as us
                os._exit(1)
        began = time.monotonic()
        status = ended_within(child, LONGEST_SECONDS if mutant is None else self._limit)
        self._learn(first=mutant is None)
        if mutant is None:
            # A loop without end is over in the time that the processor took for all, whatever else runs beside it.
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            self._cpu_seconds = 5 + int(3 * (used.ru_utime + used.ru_stime))
            # What is only slow, on a busy machine, hangs not.
            self._limit = max(self._limit, 3 * (time.monotonic() - began))
        if status is None:
            return HUNG
        return {0: PASSED, NOT_PATCHED: NOT_THIS_WAY}.get(os.waitstatus_to_exitcode(status), FAILED)

    def _answer_of(self, session: pytest.Session, mutant: Mutant | None) -> int:
        """In the fork."""
        if mutant is None:
            return self._run(session.items, note_calls=True)
        function = patched(mutant)
        if function is None:
            return NOT_PATCHED
        return self._run([item for item in session.items if self._reaches(item, mutant, function)])

    def _run(self, items: Sequence[pytest.Item], note_calls: bool = False) -> int:
        items = sorted(items, key=self._place)
        calls = Calls()
        for item, following in zip(items, [*items[1:], None], strict=False):
            if note_calls:
                calls.begin()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if note_calls:
                sys.settrace(None)
                self._note(item.nodeid, 0.0, False, sorted(calls.called))
            if item.session.testsfailed:
                return 1
        return 0

    def _reaches(self, item: pytest.Item, mutant: Mutant, function: range) -> bool:
        path = str(mutant.path)
        return any(file == path and line in function for file, line in self._calls[item.nodeid])

    def _place(self, item: pytest.Item) -> tuple[int, float]:
        last = self._noticed.index(item.nodeid) if item.nodeid in self._noticed else REMEMBERED
        return last, self._seconds.get(item.nodeid, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report.nodeid, report.duration, report.failed, [])

    def _note(self, *what: object) -> None:
        with self._noted.open("a") as file:
            print(json.dumps(what), file=file)

    def _learn(self, first: bool) -> None:
        for line in self._noted.read_text().splitlines():
            test, seconds, failed, called = json.loads(line)
            if first:
                self._seconds[test] = self._seconds.get(test, 0.0) + seconds
                self._calls[test] = self._calls.get(test, []) + [(file, line) for file, line in called]
            if failed:
                self._noticed = [test, *(other for other in self._noticed if other != test)][:REMEMBERED]


def ended_within(child: int, limit: float) -> int | None:
    """The status of the process; None when it had to be killed."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class Calls:
    """Which functions of ours are ``called`` since ``begin``, by whatever thread: file and first line. One that was
    started by an earlier test and serves all of them, as a loop does, counts for the test of the moment."""

    def __init__(self) -> None:
        self.called: set[tuple[str, int]] = set()
        self._seen: dict[int, CodeType] = {}
        self._ours = str(ROOT / "kvgrpc")

    def begin(self) -> None:
        self.called, self._seen = set(), {}
        threading.settrace(self._note)
        sys.settrace(self._note)

    def _note(self, frame: FrameType, *_: object) -> None:
        code = frame.f_code
        if id(code) not in self._seen:
            self._seen[id(code)] = code
            if code.co_filename.startswith(self._ours):
                self.called.add((code.co_filename, code.co_firstlineno))


def patched(mutant: Mutant) -> range | None:
    """Puts the fault into the function that is loaded; the lines of the function. None where that is not possible."""
    tree, node = site(mutant)
    owner = _function_around(tree, node)
    if owner is None or any(below is node for below in ast.walk(owner.args)):
        return None
    module = compile(mutant.applied(tree, node), str(mutant.path), "exec")
    line = min([owner.lineno, *(decorator.lineno for decorator in owner.decorator_list)])
    (code,) = [code for code in _codes(module) if (code.co_name, code.co_firstlineno) == (owner.name, line)]
    found = [
        function
        for function in gc.get_objects()
        if isinstance(function, FunctionType)
        and function.__code__.co_filename == str(mutant.path)
        and (function.__code__.co_name, function.__code__.co_firstlineno) == (owner.name, line)
    ]
    if any(len(function.__code__.co_freevars) != len(code.co_freevars) for function in found):
        return None
    for function in found:
        function.__code__ = code
    return range(line, (owner.end_lineno or line) + 1) if found else None


def _function_around(tree: ast.AST, node: ast.AST) -> ast.FunctionDef | None:
    """The outermost one."""
    for child in ast.iter_child_nodes(tree):
        if any(below is node for below in ast.walk(child)):
            return child if isinstance(child, ast.FunctionDef) else _function_around(child, node)
    return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _codes(const)
