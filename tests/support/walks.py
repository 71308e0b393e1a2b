"""Which files of a capability run for one unit of it: ``python -m tests.support.walks room``.

In a process of its own, because every thread must be watched from its start. Prints a path a line, below the package.
What a unit needs stands before it begins, so that files which only open something are not among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

OURS = Path(__file__).parents[2] / "kvgrpc"


class Walk:
    """Notes each file below ``folder`` whose code is called within ``unit``."""

    def __init__(self, folder: Path) -> None:
        self._below = f"{folder}/"
        self._on = False
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if self._on and event == "call" and path.startswith(self._below):
            self.files.add(path.removeprefix(self._below))

    @contextlib.contextmanager
    def unit(self) -> Iterator[None]:
        self._on = True
        try:
            yield
        finally:
            self._on = False


def room(walk: Walk) -> None:
    """One room between ranks that know each other, and two ticks of both."""
    from tests.support.rank_host import RankHost
    from tests.support.waiting import wait_until

    prefill, decode = RankHost("P", "PREFILL", {"registry": "embedded"}), RankHost("D", "DECODE", {})
    cores = [host.rank.transfer.core for host in (prefill, decode)]

    def hand_over(room: int) -> None:
        decode.receive(room, prefill.rank.address, None)
        prefill.send(room, range(4))
        decode.give_pages(room, range(4, 8))
        assert [poll for poll, *_ in decode.wait("receivers", [room], [0, 4]).values()] == [4]
        prefill.wait("senders", [room], [4])
        ticks = [core.now + 2 for core in cores]
        wait_until(lambda: all(core.now >= tick for core, tick in zip(cores, ticks, strict=True)))

    hand_over(1)
    with walk.unit():
        hand_over(2)
    for host in (decode, prefill):
        host.close(1.0)


def event(walk: Walk) -> None:
    """One batch, from ``publish`` to an index that knows who holds its block."""
    from kvgrpc.client import EventFollower
    from tests.support.publishing import Publishing
    from tests.support.waiting import until

    async def publish() -> None:
        engine = Publishing(publisher="zmq", endpoint="tcp://127.0.0.1:*")
        async with engine, EventFollower(engine.address) as follower:
            for block in (7, 8):
                with walk.unit() if block == 8 else contextlib.nullcontext():
                    await engine.store([block])
                    await until(lambda block=block: bool(follower.media_of(block)))  # type: ignore[misc]

    asyncio.run(publish())


def registration(walk: Walk) -> None:
    """A rank registers, somebody who watches hears of it, and a decode resolves it."""
    from kvgrpc.client import SyncClient
    from kvgrpc.server import RegistryServer
    from tests.support.rank_host import RankHost
    from tests.support.waiting import wait_until

    registry = RegistryServer(["127.0.0.1:0"]).open()
    decode = RankHost("D", "DECODE", {})
    with SyncClient(registry.address) as client, walk.unit():
        changes = client.watch_engines()
        next(changes)
        prefill = RankHost("P", "PREFILL", {"registry": registry.address})
        decode.receive(1, f"{registry.address}/P", None)
        prefill.send(1, range(4))
        wait_until(lambda: decode.receivers[1, 0].prefill_ready)
        next(changes)
    for host in (decode, prefill):
        host.close(1.0)
    registry.close()


def prefetch(walk: Walk) -> None:
    """Twelve pages, asked for by a client, from files."""
    from kvgrpc.client import SyncClient
    from kvgrpc.v1 import prefetch_service_pb2 as pb
    from tests.support.cache_serving import hashes_of, open_cache_rank, prompt

    with tempfile.TemporaryDirectory() as folder:
        rank = open_cache_rank(Path(folder))
        rank.store(hashes_of(prompt(12)))
        with walk.unit(), SyncClient(rank.address) as client:
            operation = client.start_prefetch(pb.PromptPages(tokens=prompt(12)))
            for message in client.watch_operations([operation.operation_id]):
                operation = next(iter(message.operations), operation)
        rank.close()
    assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DONE, 12), operation


UNITS: dict[str, tuple[str, Callable[[Walk], None]]] = {
    "room": ("transfer", room),
    "event": ("events", event),
    "registration": ("registry", registration),
    "prefetch": ("prefetch", prefetch),
}


def main() -> None:
    folder, unit = UNITS[sys.argv[1]]
    walk = Walk(OURS / folder)
    threading.setprofile(walk)
    sys.setprofile(walk)
    unit(walk)
    sys.setprofile(None)
    print(*sorted(walk.files), sep="\n")


if __name__ == "__main__":
    main()
