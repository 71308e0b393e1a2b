"""What each step of a room costs: ``python -m benchmarks.steps [--turns N]``.

Both ranks in one process, a data plane that does nothing, and the steps of 1,024 rooms one after the other on the
loop's thread with nothing beside them, each the quickest of all turns. Their sum is the Python that
``control.throughput`` takes at least; what it takes more is the other process on the same core, cold caches and the
garbage collector.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.sides.base import Poll, Setting
from benchmarks.sides.memory import Shape
from benchmarks.sides.ours import KvgrpcDecode, KvgrpcPrefill
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.transfer import wire
from kvgrpc.v1 import transfer_service_pb2 as pb

ROOMS = 1024
TURN_SECONDS = 60.0
_AT_ONCE = 256  # what the transfer thread starts at a time
Value = TypeVar("Value")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.steps", description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    turns = parser.parse_args(arguments).turns
    setting = Setting("kvgrpc", "null", Shape(regions=1, pages=2 * ROOMS, page_bytes=64, aux_items=ROOMS))
    prefill = KvgrpcPrefill(setting)
    try:
        decode = KvgrpcDecode(setting, prefill.bootstrap)
        try:
            steps = Steps(prefill, decode)
            for _ in range(turns):
                LoopThread.shared().run(steps.turn(), TURN_SECONDS)
        finally:
            decode.close()
    finally:
        prefill.close()
    _show(steps.quickest, Console())
    return 0


class Steps:
    """``quickest``: seconds for a room of each step, by process and name, in the order in which a room takes them."""

    def __init__(self, prefill: KvgrpcPrefill, decode: KvgrpcDecode) -> None:
        self._prefill, self._decode = prefill, decode
        self._first_room = 1
        self.quickest: dict[tuple[str, str], float] = {}
        self._hand_over_one()
        gc.collect()
        gc.freeze()

    async def turn(self) -> None:
        """One turn of the loop, so that nothing of both ranks runs beside it."""
        prefill, decode = self._prefill._manager, self._decode._manager
        pages = list(np.arange(2 * ROOMS, dtype=np.int32).reshape(-1, 1))
        numbers = range(self._first_room, self._first_room + ROOMS)
        self._first_room += ROOMS
        senders = [self._prefill.sender(number) for number in numbers]
        receivers = [self._decode.receiver(number) for number in numbers]
        prefill._run()
        decode._run()
        ((stream, _),) = decode._sessions.items()
        ((pair, session),) = prefill._sessions.items()

        def give_pages() -> None:
            for row, receiver in enumerate(receivers):
                receiver.init(pages[row], row)

        def send() -> None:
            for row, sender in enumerate(senders):
                if sender.poll() >= Poll.WAITING_FOR_INPUT:
                    sender.init(1, row)
                    sender.send(pages[ROOMS + row], slice(0, 1), True)

        def tell_prefill() -> list[bytes]:
            entries = decode.core.flush(stream.pair)
            return [each.SerializeToString() for each in wire.encode_requests(entries, 2**30, [])]

        def hear_decode(frame: bytes) -> list[Any]:
            message = pb.SessionRequest.FromString(frame)
            return list(wire.parse_request(message, session.pool_pages, prefill.own_pages))

        def tell_decode() -> list[bytes]:
            entries = prefill.core.flush(pair)
            return [each.SerializeToString() for each in wire.encode_responses(entries, 2**30)]

        self._time("decode", "engine: init", give_pages)
        self._time("decode", "loop: pages", decode._run)
        (frame,) = self._time("decode", "loop: tells prefill", tell_prefill)
        entries = self._time("prefill", "loop: reads it", lambda: hear_decode(frame))
        self._time("prefill", "loop: destinations", lambda: prefill.core.on_frame(session, session.ref, entries))
        self._time("prefill", "engine: poll, init, send", send)
        submissions = self._take_submissions(lambda: self._time("prefill", "loop: chunks", prefill._run))
        ended = self._time("prefill", "transfer thread: plans, writes", lambda: self._write(submissions))
        self._time("prefill", "loop: outcomes", lambda: prefill._take_outcomes(ended))
        self._time("prefill", "loop: counts", prefill._pump)
        (answer,) = self._time("prefill", "loop: tells decode", tell_decode)
        response = pb.SessionResponse.FromString(answer)
        news = self._time("decode", "loop: reads it", lambda: list(wire.parse_response(response)))
        self._time("decode", "loop: ends", lambda: decode.core.on_frame(stream, news))
        self._time("decode", "loop: counts", decode._pump)
        (frame,) = self._time("decode", "loop: tells prefill to forget", tell_prefill)
        entries = hear_decode(frame)
        self._time("prefill", "loop: forgets", lambda: prefill.core.on_frame(session, session.ref, entries))
        self._time("decode", "engine: poll, close", lambda: self._close(receivers))
        self._time("prefill", "engine: poll, close", lambda: self._close(senders))

    def _time(self, process: str, name: str, step: Callable[[], Value]) -> Value:
        begin = time.perf_counter()
        value = step()
        took = (time.perf_counter() - begin) / ROOMS
        self.quickest[process, name] = min(took, self.quickest.get((process, name), took))
        return value

    def _take_submissions(self, step: Callable[[], None]) -> list[Any]:
        """What the loop gives the transfer thread in this step, which does not get it."""
        worker: Any = self._prefill._manager._worker
        taken: list[Any] = []
        worker.submit = taken.extend
        try:
            step()
        finally:
            del worker.submit
        return taken

    def _write(self, submissions: Sequence[Any]) -> list[Any]:
        worker = self._prefill._manager._worker
        ended = []
        with worker._turn:
            for first in range(0, ROOMS, _AT_ONCE):
                worker._start_all(submissions[first : first + _AT_ONCE])
            ended, worker._ended = worker._ended, []
        worker._count_ended(ended, ROOMS)
        return ended

    def _close(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            if handle.poll() == Poll.SUCCESS:
                handle.close()

    def _hand_over_one(self) -> None:
        """So that the session stands, and what is made once is there."""
        sender, receiver = self._prefill.sender(2**62), self._decode.receiver(2**62)
        receiver.init([0], 0)
        sender.init(1, 0)
        sender.send([0])
        for handle in (sender, receiver):
            assert handle.wait(TURN_SECONDS) >= Poll.SUCCESS, handle.failure
            handle.close()
        end = time.monotonic() + TURN_SECONDS
        while self._prefill._manager.core.rooms and time.monotonic() < end:  # decode forgets it with its next tick
            time.sleep(0.01)


def _show(quickest: dict[tuple[str, str], float], console: Console) -> None:
    table = Table(title=f"one of {ROOMS} rooms, us", title_justify="left")
    table.add_column("process")
    table.add_column("step")
    table.add_column("us", justify="right")
    for process in ("prefill", "decode"):
        steps = {name: seconds for (of, name), seconds in quickest.items() if of == process}
        for name, seconds in steps.items():
            table.add_row(process, name, f"{seconds * 1e6:.2f}")
        table.add_row(process, "all", f"{sum(steps.values()) * 1e6:.2f}", style="bold", end_section=True)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
