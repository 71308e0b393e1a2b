"""For SGLANG_ON_CPU_PLUGIN: a hand-off that decode's second pipeline stage loses when its first one has all of it.

The rooms are files in a folder, named by the test and, with another ending, by the first stage.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines import hicache_on_cpu

ROOMS = "TEST_LOST_ROOMS"
PLUGIN = f"{__name__}:register"


def register() -> None:
    from sglang.srt.runtime_context import get_parallel

    from kvgrpc.engines.sglang.receiver import KvGrpcReceiver

    hicache_on_cpu.register()
    ours: Any = KvGrpcReceiver
    ours.poll = losing(ours.poll, Path(os.environ[ROOMS]), get_parallel)


def losing(poll: Callable[[Any], Any], rooms: Path, get_parallel: Callable[[], Any]) -> Callable[[Any], Any]:
    def poll_there(receiver: Any) -> Any:
        from kvgrpc.transfer import KVPoll

        state, room = poll(receiver), rooms / str(receiver.bootstrap_room)
        if state != KVPoll.Success or not room.exists():
            return state
        first_has_it = room.with_suffix(".first")
        if get_parallel().pp_rank == 0:
            first_has_it.touch()
            return state
        return KVPoll.Failed if first_has_it.exists() else KVPoll.Transferring

    return poll_there
