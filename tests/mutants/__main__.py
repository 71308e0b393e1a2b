"""``python -m tests.mutants [TARGET...]``: runs the tests of a target once for each fault, and lists what survives.

Each fault lives in a fork: most in one of a process that has loaded the tests, some in one that has loaded pytest but
nothing of ours. What survives and is known to be harmless stands
in ``known.txt`` with the reason; the exit code is 1 where something else survives.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

import hypothesis
import msgspec
import numpy
import pytest

from tests.mutants.faults import Mutant, mutants_of
from tests.mutants.targets import ROOT, TARGETS, files_of
from tests.mutants.warm import FAILED, HUNG, NOT_THIS_WAY, PASSED, WarmTests, be_silent, ended_within

KNOWN = ROOT / "tests" / "mutants" / "known.txt"
# Of one fault; no target's tests take half as long, nor a tenth of it when the machine is quiet.
LIMIT_SECONDS = 120.0
PRELOADED = (hypothesis, msgspec, numpy)


def main() -> int:
    options = _options()
    known = known_survivors()
    survived = _survivors(options.again) if options.again else set()
    unknown = 0
    for target in options.targets or TARGETS:
        mutants = [mutant for path in files_of(target) for mutant in mutants_of(path)]
        mutants = [mutant for mutant in mutants if re.search(options.only, key_of(mutant))]
        if options.again:
            mutants = [mutant for mutant in mutants if key_of(mutant) in survived - known]
        if options.sample:
            mutants = sorted(random.Random(options.seed).sample(mutants, min(options.sample, len(mutants))), key=_place)
        tests = [str(ROOT / "tests" / name) for name in options.tests or TARGETS[target][1]]
        warm = WarmTests(tests, LIMIT_SECONDS)
        if warm.verdict(None) != PASSED:
            sys.exit(f"{target}: the tests fail without any fault")
        killed = 0
        for number, mutant in enumerate(mutants):
            if number % 25 == 0:
                print(f"{target}: {number} of {len(mutants)}, {killed} noticed", file=sys.stderr, flush=True)
            verdict = warm.verdict(mutant)
            if verdict == NOT_THIS_WAY:
                verdict = _verdict(mutant, tests)
            if verdict != PASSED:
                killed += 1
            elif key_of(mutant) not in known:
                unknown += 1
                print(f"SURVIVES {key_of(mutant)}   (line {mutant.line})", flush=True)
        warm.close()
        print(f"{target}: {killed} of {len(mutants)} faults were noticed", flush=True)
    return 1 if unknown else 0


def _verdict(mutant: Mutant, tests: Sequence[str]) -> str:
    """Of the tests, loaded anew with the fault."""
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        be_silent()
        sys.meta_path.insert(0, _Finder(mutant))
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--timeout", str(LIMIT_SECONDS)]
        os._exit(int(pytest.main([*options, *tests])) != 0)
    status = ended_within(child, LIMIT_SECONDS)
    if status is None:
        return HUNG
    return FAILED if status else PASSED


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module with the fault; everything else is as it is."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = ".".join(mutant.path.relative_to(ROOT).with_suffix("").parts)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        loader = _Loader(name, str(self._mutant.path))
        loader.code = compile(self._mutant.tree(), str(self._mutant.path), "exec")
        return importlib.util.spec_from_file_location(name, self._mutant.path, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    code: CodeType

    def get_code(self, fullname: str) -> CodeType:
        return self.code


def _place(mutant: Mutant) -> tuple[str, int]:
    return str(mutant.path), mutant.line


def key_of(mutant: Mutant) -> str:
    """Without the line, so that a known one stays known when others move."""
    return f"{mutant.path.relative_to(ROOT).as_posix()} {mutant.what}".rstrip()


def known_survivors() -> set[str]:
    lines = KNOWN.read_text().splitlines() if KNOWN.exists() else []
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def _survivors(output: Path) -> set[str]:
    """Of an earlier run, by what it printed."""
    lines = [line for line in output.read_text().splitlines() if line.startswith("SURVIVES ")]
    return {line.removeprefix("SURVIVES ").rpartition("   (line ")[0].rstrip() for line in lines}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help=f"of {', '.join(TARGETS)}; none: all")
    parser.add_argument("--only", default="", help="a pattern that file and fault must match")
    parser.add_argument("--sample", type=int, default=0, help="so many faults of each target, by chance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--again", type=Path, help="only what survives by this file, an earlier run's output, and is not known"
    )
    parser.add_argument("--tests", nargs="+", help="these below tests/ instead of the target's")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
