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
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType

import hypothesis
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st

from tests.mutants.faults import Mutant, site

PASSED, FAILED, HUNG, NOT_THIS_WAY = "passed", "failed", "hung", "not this way"
REMEMBERED = 12
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
            options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--timeout", str(limit)]
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
    """A plugin of pytest that runs the tests once for each question, in a fork: those first that noticed the last
    faults, then the quickest. A failed property is not made smaller."""

    def __init__(self, asks: int, answers: int, noted: Path, limit: float) -> None:
        self._asks, self._answers = os.fdopen(asks), os.fdopen(answers, "w")
        self._noted = noted
        self._limit = limit
        self._cpu_seconds = 0
        self._seconds: dict[str, float] = {}
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
            if mutant is not None and not patched(mutant):
                os._exit(NOT_PATCHED)
            os._exit(self._run(session))
        status = ended_within(child, self._limit)
        self._learn(first=mutant is None)
        if mutant is None:
            # A loop without end is over in the time that the processor took for all, whatever else runs beside it.
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            self._cpu_seconds = 5 + int(3 * (used.ru_utime + used.ru_stime))
        if status is None:
            return HUNG
        return {0: PASSED, NOT_PATCHED: NOT_THIS_WAY}.get(os.waitstatus_to_exitcode(status), FAILED)

    def _run(self, session: pytest.Session) -> int:
        items = sorted(session.items, key=self._place)
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return 1
        return 0

    def _place(self, item: pytest.Item) -> tuple[int, float]:
        last = self._noticed.index(item.nodeid) if item.nodeid in self._noticed else REMEMBERED
        return last, self._seconds.get(item.nodeid, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        with self._noted.open("a") as file:
            print(json.dumps([report.nodeid, report.duration, report.failed]), file=file)

    def _learn(self, first: bool) -> None:
        for line in self._noted.read_text().splitlines():
            test, seconds, failed = json.loads(line)
            if first:
                self._seconds[test] = self._seconds.get(test, 0.0) + seconds
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


def patched(mutant: Mutant) -> bool:
    """Puts the fault into the function that is loaded. False where that is not possible."""
    tree, node = site(mutant)
    owner = _function_around(tree, node)
    if owner is None or any(below is node for below in ast.walk(owner.args)):
        return False
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
        return False
    for function in found:
        function.__code__ = code
    return bool(found)


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
