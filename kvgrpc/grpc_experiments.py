"""Which of the gRPC library's own experiments this process runs without, decided before the library is loaded.

gRPC moved the polling of its sockets to an "event engine" of its own, behind two experiments that newer releases turn
on. With ``grpc.aio`` each message then passes through one more thread on either side: a frame there and back takes
0.18 ms instead of 0.11 (grpcio 1.85, 2 cores; docs/performance.md). They are switched by ``GRPC_EXPERIMENTS``, which
the library reads once, when it is loaded.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys

VARIABLE = "GRPC_EXPERIMENTS"
WITHOUT_EVENT_ENGINE = "-event_engine_client,-event_engine_listener"
# Where it was measured and all tests run. Others keep their own choice: 1.75 has them off, and one that no longer
# knows a name complains on stderr.
MEASURED = ((1, 85),)


def leave_out_event_engine() -> bool:
    """Whether the library will run without it. A process that set ``GRPC_EXPERIMENTS`` itself, even to nothing, or that
    has loaded grpc already, keeps what it has; so does a version for which it was not measured."""
    if VARIABLE in os.environ or "grpc" in sys.modules or _version() not in MEASURED:
        return False
    os.environ[VARIABLE] = WITHOUT_EVENT_ENGINE
    return True


def _version() -> tuple[int, int] | None:
    """Of the library that an import would find, without importing it; None: it does not say."""
    try:
        spec = importlib.util.find_spec("grpc")
        if spec is None or spec.origin is None:
            return None
        with open(os.path.join(os.path.dirname(spec.origin), "_grpcio_metadata.py"), encoding="ascii") as file:
            said = file.read()
    except (ImportError, OSError, ValueError):
        return None
    found = re.search(r"(\d+)\.(\d+)\.", said)
    return None if found is None else (int(found[1]), int(found[2]))
