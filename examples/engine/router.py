"""Starts both engines and sends them three requests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REQUESTS: list[dict[str, Any]] = [
    {"room": 1, "prompt": [5, 7, 9], "held": 0, "give_up": False, "seconds": 0.0},
    {"room": 2, "prompt": [1, 2, 3, 4], "held": 1, "give_up": False, "seconds": 0.0},
    {"room": 3, "prompt": [6, 6, 6], "held": 0, "give_up": True, "seconds": 0.3},
]


class Engine:
    """One of the two scripts; it dies with its standard input."""

    def __init__(self, script: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        self.address: str = self.answer()["address"]

    def ask(self, request: dict[str, Any]) -> None:
        self._questions.write(json.dumps(request) + "\n")
        self._questions.flush()

    def answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"an engine ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._questions.close()
        self._process.wait(20)


def main() -> None:
    prefill, decode = Engine("prefill.py"), Engine("decode.py")
    for request in REQUESTS:
        prefill.ask(request)
        decode.ask({**request, "prefill": prefill.address})
        print("prefill", prefill.answer())
        print("decode ", decode.answer())
    prefill.close()
    decode.close()


if __name__ == "__main__":
    main()
