"""The findings of ``kvgrpc doctor --engine``: features of the adapter that work with the engine here, or not."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

from kvgrpc.cli.doctor.finding import Finding
from kvgrpc.engines.compatibility import ENGINES, is_tried, missing, version_of

# vLLM and SGLang import torch, on a cold disk; the first time Python compiles all that they are made of.
LOOK_SECONDS = 600.0
# One thing that is missing is often the reason of others.
_SHOWN = 3
_ANSWER = "kvgrpc found: "


def engine_findings(name: str) -> list[Finding]:
    """Looks in a process of its own: an engine's modules start what they like, and may end it."""
    look = f"from kvgrpc.cli.doctor.engine_findings import print_findings; print_findings({name!r})"
    try:
        ran = subprocess.run(
            [sys.executable, "-c", look], capture_output=True, text=True, errors="replace", timeout=LOOK_SECONDS
        )
    except subprocess.TimeoutExpired:
        return [Finding(name, "missing", f"was not loaded within {LOOK_SECONDS:g} s")]
    lines = [line for line in ran.stdout.splitlines() if line.startswith(_ANSWER)]
    if ran.returncode or not lines:
        sys.stderr.write(ran.stderr)
        return [Finding(name, "missing", f"ended the process that loaded it (exit code {ran.returncode})")]
    return [Finding(*each) for each in json.loads(lines[-1].removeprefix(_ANSWER))]


def print_findings(name: str) -> None:
    """In that process: on a line of stdout of its own, whatever an engine prints while it is loaded, and at its end."""
    found = [list(each) for each in findings(name)]
    with contextlib.suppress(BrokenPipeError):
        print("\n" + _ANSWER + json.dumps(found), flush=True)


def findings(name: str) -> Iterator[tuple[str, str, str]]:
    engine = ENGINES[name]
    version, tried = version_of(engine), ", ".join(engine.tried)
    if version == "of unknown version":
        yield name, "missing", f"not installed here: pip install {name}=={engine.newest}"
        return
    if is_tried(engine):
        yield name, "ok", f"{version}, which kvgrpc was run with"
    else:
        yield name, "note", f"{version}, which kvgrpc was never run with ({tried} were): it warns, and goes on"
    for feature, needs in engine.needs.items():
        gone = list(missing(needs))
        more = f"; and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else ""
        state, remark = "ok", f"all {len(needs)} names that it needs"
        if gone:
            state, remark = "missing", "; ".join(gone[:_SHOWN]) + more
        elif not is_tried(engine, feature):
            state, remark = "note", "present, never run with this version: it warns, and goes on"
        yield f"{engine.title} {feature}", state, remark
