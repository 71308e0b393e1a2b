"""Which files of kvgrpc/prefetch run for one prefetch of a remote client: ``python -m tests.support.prefetch_walk``.

In a process of its own, because every thread must be watched from its start. Prints a path a line, below the package.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).parents[2] / "kvgrpc" / "prefetch") + "/"


class Walk:
    """Notes each file whose code is called while it is ``on``."""

    def __init__(self) -> None:
        self.on = False
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if self.on and event == "call" and path.startswith(PACKAGE):
            self.files.add(path.removeprefix(PACKAGE))


def main() -> None:
    walk = Walk()
    threading.setprofile(walk)
    sys.setprofile(walk)
    from kvgrpc.client import SyncClient
    from kvgrpc.v1 import prefetch_service_pb2 as pb
    from tests.support.cache_serving import hashes_of, open_cache_rank, prompt

    with tempfile.TemporaryDirectory() as folder:
        rank = open_cache_rank(Path(folder))
        rank.store(hashes_of(prompt(12)))
        walk.on = True
        with SyncClient(rank.address) as client:
            operation = client.start_prefetch(pb.PromptPages(tokens=prompt(12)))
            for message in client.watch_operations([operation.operation_id]):
                operation = next(iter(message.operations), operation)
        walk.on = False
        rank.close()
    sys.setprofile(None)
    assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DONE, 12), operation
    print(*sorted(walk.files), sep="\n")


if __name__ == "__main__":
    main()
