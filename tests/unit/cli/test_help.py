"""``kvgrpc --help`` answers at once: it loads no gRPC, no protobuf and no numpy."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from kvgrpc.cli.main import command
command(["--help"], standalone_mode=False)
print([name for name in ("grpc", "google.protobuf", "numpy", "prometheus_client", "zmq") if name in sys.modules])
"""


def test_the_help_loads_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=50)
    assert "Run a server in the foreground." in done.stdout
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
