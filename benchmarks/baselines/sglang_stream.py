"""The floor of any hand-off between SGLang engines that is made of gRPC and Mooncake: a transfer backend of one bare
stream and bare writes, with the fewest changes of thread that there can be.

As sglang_bare, but what decode wants and how it ended are frames of a bidirectional stream, and Mooncake writes the
bytes. Prefill's scheduler itself submits them and looks for their end at each poll, so that no thread lies between the
engine and Mooncake. The loop's thread, its wake and polls that give way are kvgrpc's. No registry, no rules, no
failure, no evidence.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.runtime_context import get_disagg

from benchmarks.baselines.engines import mooncake_engine
from benchmarks.baselines.sglang_bare import BareManager, BareReceiver, BareSender, add_backend
from benchmarks.baselines.stream import StreamEnd
from kvgrpc.model import Region
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.waking import Waker
from kvgrpc.transfer.layout.plan import Geometry

HOST = "127.0.0.1"
# As TransferManager's.
GIVE_WAY_SECONDS, GIVE_WAY_EVERY_SECONDS = 50e-6, 200e-6


class Wanted(msgspec.Struct):
    """From decode: the numbers of its pages, its Mooncake session, its addresses."""

    room: int
    pages: bytes
    session: str
    addresses: list[int]


class Given(msgspec.Struct):
    """From prefill, when all is written."""

    room: int
    aux: list[bytes]


def install() -> None:
    """As sglang_bare.install, of the backend "stream"."""
    add_backend("stream", StreamManager)


class StreamManager(BareManager):
    def start(self, is_prefill: bool) -> None:
        args = self.kv_args
        self._engine = mooncake_engine(HOST)
        self._session = f"{HOST}:{self._engine.get_rpc_port()}"
        self._engine.batch_register_memory(list(args.kv_data_ptrs), list(args.kv_data_lens))
        self._geometries: dict[str, Geometry] = {}
        self._writes: dict[int, list[int]] = {}
        self._thread = LoopThread.shared()
        self._waker = Waker(self._thread.loop, self._say_all)
        self._frames: deque[bytes] = deque()
        self._next_way = 0.0
        self._stream = StreamEnd(self._take_wanted if is_prefill else self._take_given, self._thread.loop)
        self._dialled = False
        if is_prefill:
            self._stream.serve(get_disagg().disaggregation_bootstrap_port)

    def want(self, receiver: BareReceiver) -> None:
        if not self._dialled:
            self._stream.connect(int(receiver.address.rpartition(":")[2]))
            self._dialled = True
        addresses = list(self.kv_args.kv_data_ptrs)
        self._say(Wanted(receiver.bootstrap_room, receiver.pages.tobytes(), self._session, addresses))

    def give(self, sender: BareSender) -> None:
        wanted = self.wanted.pop(sender.room)
        pages = np.array(sender.pages, np.uint32)
        plan = self._geometry(wanted).plan(pages, np.frombuffer(wanted.pages, np.uint32))
        rows = zip(*(column.tolist() for column in plan.columns), strict=True)
        self._writes[sender.room] = [self._engine.transfer_submit_write(wanted.session, *row) for row in rows]

    def is_given(self, sender: BareSender) -> bool:
        writes = self._writes.get(sender.room)
        if writes is None:
            return True
        while writes:
            if (status := self._engine.transfer_check_status(writes[-1])) == 0:
                return False
            if status != 1:
                raise RuntimeError(f"Mooncake said {status} of a write of room {sender.room}")
            writes.pop()
        del self._writes[sender.room]
        self._say(Given(sender.room, [ctypes.string_at(*row) for row in self.rows((), sender.aux_row)]))
        return True

    def give_way(self) -> None:
        now = time.monotonic()
        if now >= self._next_way and self._thread.work_waits:
            self._next_way = now + GIVE_WAY_EVERY_SECONDS
            time.sleep(GIVE_WAY_SECONDS)

    def _geometry(self, wanted: Wanted) -> Geometry:
        if wanted.session not in self._geometries:
            own, theirs = (self._regions(addresses) for addresses in (self.kv_args.kv_data_ptrs, wanted.addresses))
            self._geometries[wanted.session] = Geometry(own, theirs)
        return self._geometries[wanted.session]

    def _regions(self, addresses: list[int]) -> list[Region]:
        lengths = self.kv_args.kv_item_lens
        return [Region(0, "k", address, nbytes, nbytes) for address, nbytes in zip(addresses, lengths, strict=True)]

    def _say(self, message: Any) -> None:
        self._frames.append(msgspec.msgpack.encode(message))
        self._next_way = 0.0
        self._waker.wake()

    def _say_all(self) -> None:
        while self._frames:
            self._stream.start(self._stream.send(self._frames.popleft()))

    def _take_wanted(self, frame: bytes) -> None:
        wanted = msgspec.msgpack.decode(frame, type=Wanted)
        self.wanted[wanted.room] = wanted

    def _take_given(self, frame: bytes) -> None:
        given = msgspec.msgpack.decode(frame, type=Given)
        receiver = self.receivers.pop(given.room)
        for (address, nbytes), row in zip(self.rows((), receiver.aux_row), given.aux, strict=True):
            ctypes.memmove(address, row, nbytes)
        receiver.state = KVPoll.Success
