"""Writes an engine's part of ``hashes.json`` with the engine's own classes, in an environment that has it.

.venv-vllm/bin/python -m tests.conformance.events.make_hashes vllm
.venv-sglang/bin/python -m tests.conformance.events.make_hashes sglang
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tests.support.engine_hashes import Case, engine_version, numbers_of, random_case

PATH = Path(__file__).parent / "hashes.json"
CASES = 150


def main(engine: str) -> None:
    rng, numbers = random.Random(25), numbers_of(engine)
    cases: list[Case] = []
    while len(cases) < CASES:
        case = random_case(rng, engine)
        if found := numbers(case):
            # As hexadecimal digits: numbers beyond 2^53 are not exact everywhere.
            cases.append(case | {"hashes": [f"{number:016x}" for number in found]})
    known = json.loads(PATH.read_text()) if PATH.exists() else {}
    known[engine] = {"version": engine_version(engine), "cases": cases}
    lines = [
        f'"{name}": {{"version": "{part["version"]}", "cases": [\n'
        + ",\n".join(json.dumps(case, ensure_ascii=False) for case in part["cases"])
        + "\n]}"
        for name, part in sorted(known.items())
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1])
