"""Our tier over a storage that takes seconds for a read, while a file says so."""

from __future__ import annotations

import os
from typing import Any

from kvgrpc.engines.vllm.tier import KvGrpcTier
from tests.support.faults.storage import Fault, FaultyBackend

READ_SECONDS = 4.0


class SlowTier(KvGrpcTier):
    """``slow_while``: the path of that file; the others are our tier's."""

    def __init__(self, *arguments: Any, slow_while: str, **more: Any) -> None:
        super().__init__(*arguments, **more)

        def fault(call: str, key: str) -> Fault | None:
            return Fault(delay=READ_SECONDS) if call == "read" and os.path.exists(slow_while) else None

        self.backend = FaultyBackend(self.backend, fault)
