"""Mutates payloads for a while and lets every reader of ours read them.

    python3 -m venv /tmp/atheris && /tmp/atheris/bin/pip install atheris msgspec numpy protobuf grpcio prometheus-client
    /tmp/atheris/bin/python -m tests.fuzz --seconds 60

It needs atheris, which no lock of this project has, and steers by the branches of ``kvgrpc.events.codec`` and of what
folds events. It begins with the golden and the hostile payloads of ``tests/conformance/events``. A finding is written
into the folder that ``--findings`` names: put its bytes into ``hostile.json`` beside the golden ones, where a quick
test reads them from then on.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

from tests.fuzz.corpus import GOLDEN, hostile

LONGEST = 4096


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzzes the readers of event payloads.")
    parser.add_argument("--seconds", type=int, default=60, help="how long")
    parser.add_argument("--findings", type=Path, default=Path(tempfile.gettempdir()), help="where inputs that fail go")
    given = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        parser.exit(1, "atheris is not installed here; the text at the head of tests/fuzz/__main__.py has the line\n")
    with tempfile.TemporaryDirectory() as folder:
        for name, payload in seeds():
            (Path(folder) / name).write_bytes(payload)
        fuzz(folder, given.seconds, given.findings)


def seeds() -> list[tuple[str, bytes]]:
    golden = [(path.name, path.read_bytes()) for path in sorted(GOLDEN.glob("*.msgpack"))]
    return golden + [(case.name, case.payload) for case in hostile() if len(case.payload) <= LONGEST]


def fuzz(folder: str, seconds: int, findings: Path) -> None:
    import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]  # no lock has it

    with atheris.instrument_imports(include=["kvgrpc.events", "tests.fuzz.reading"]):
        from tests.fuzz.reading import read

    limits = [f"-max_total_time={seconds}", f"-max_len={LONGEST}", "-timeout=10", "-rss_limit_mb=2048"]
    report = ["-print_final_stats=1", f"-artifact_prefix={findings}/"]
    atheris.Setup([sys.argv[0], *limits, *report, folder], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
