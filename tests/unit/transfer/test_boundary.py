"""Another runtime than ours: mypy reads here that the two Protocols are all it must have, and both ends run on it."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kvgrpc.dataplane.base import DataPlane
from kvgrpc.errors import Failure, Reason
from kvgrpc.model import RankId, RankRef
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.server import DecodeRuntime, KVPoll, KVReceiver, KVSender, PrefillRuntime, Rank
from kvgrpc.server.rank.status import RankStatus
from kvgrpc.transfer.aux_rows import AuxRows
from kvgrpc.transfer.layout.pools import CopiedPages, pages_of_pools
from kvgrpc.transfer.layout.topology import Shape
from kvgrpc.transfer.protocol.types import Align, RoomKey
from kvgrpc.transfer.runtime import boundary
from kvgrpc.transfer.runtime.boundary import EngineHandle, Reader, RoomRequest, SentPages, prefill_of
from kvgrpc.transfer.tables import RoomRow, SessionRow
from kvgrpc.v1 import transfer_service_pb2 as pb
from tests.support.waiting import wait_until


class Foreign:
    """Of no class of ours. ``asked``: what the engine's ends asked of it, in order; the rest nobody calls here."""

    on_change: Callable[[], None] | None = None
    queue_full = False
    healthy = True
    has_unknown_writes = False
    held_pages = held_pages_limit = 0
    plane: DataPlane
    shape: Shape

    def __init__(self, role: str) -> None:
        self.role = role
        self.ref = RankRef(RankId("F"), 1)
        self.pool_names = ("kv",)
        self.aux = AuxRows(())
        self.asked: list[str] = []

    def refusal(self, key: RoomKey) -> Failure | None:
        return None

    def overflow(self, key: RoomKey) -> Failure:
        return Failure(Reason.TOO_MANY_REQUESTS, "full")

    def give_way(self) -> None:
        self.asked.append("give_way")

    def claim(self, key: RoomKey, handle: EngineHandle, decode: str) -> None:
        self.asked.append("claim")
        handle.record = len(self.asked)  # whatever it likes

    def send(
        self, handle: EngineHandle, sent: SentPages, aux: bytes | None, expectation: tuple[int | None, Align] | None
    ) -> None:
        self.asked.append(f"send {pages_of_pools(sent.pages)[0].tolist()}")

    def stands(self, request: RoomRequest) -> bool:
        return True

    def open(self, handle: EngineHandle, request: RoomRequest) -> None:
        self.asked.append(f"open {request.key.room} {request.bootstrap_addr}")
        handle.record = request

    def write(self, handle: EngineHandle, pages: CopiedPages, first_page: int, aux_index: int | None) -> None:
        self.asked.append(f"write {pages_of_pools(pages)[0].tolist()}")

    def fail(self, handle: EngineHandle, failure: Failure) -> None:
        self.asked.append(f"fail {failure.reason.name}")

    def fileno(self) -> int:
        raise NotImplementedError

    def open_rooms(self) -> int:
        raise NotImplementedError

    async def rooms_by_state(self) -> Mapping[str, int]:
        raise NotImplementedError

    def depths(self) -> Mapping[str, int]:
        raise NotImplementedError

    def sessions(self) -> list[SessionRow]:
        raise NotImplementedError

    async def newest_failed(
        self, count: int, wanted: Callable[[RoomRow], bool] | None = None
    ) -> tuple[list[RoomRow], int]:
        raise NotImplementedError

    async def slowest(self, count: int, wanted: Callable[[RoomRow], bool] | None = None) -> tuple[list[RoomRow], int]:
        raise NotImplementedError

    async def page_of_rooms(
        self, after: RoomKey, count: int, wanted: Callable[[RoomRow], bool] | None = None
    ) -> tuple[list[RoomRow], RoomKey | None, int]:
        raise NotImplementedError

    def room(self, key: RoomKey) -> RoomRow | None:
        raise NotImplementedError

    def cancel(self, key: RoomKey, failure: Failure) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    async def drain(self, grace: float) -> tuple[bool, int]:
        raise NotImplementedError

    def undrain(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    async def serve(
        self, read: Reader, write: Callable[[pb.SessionResponse], Awaitable[None]], caller: str = ""
    ) -> None:
        raise NotImplementedError

    def close_worker(self, deadline: float) -> bool:
        raise NotImplementedError

    def on_plane_closed(self) -> None:
        raise NotImplementedError

    async def locate(self, keys: Sequence[RoomKey], timeout: float) -> list[RoomKey]:
        raise NotImplementedError


def rank_of(rank: Rank[Foreign], loop: LoopThread) -> tuple[PrefillRuntime, DecodeRuntime, RankStatus]:
    """For mypy alone: a rank may have it, it is of both roles, and what serves a rank takes it."""
    return rank.transfer, rank.transfer, RankStatus("", loop, rank.transfer)


def test_both_ends_of_a_hand_off_run_on_a_runtime_that_is_none_of_ours() -> None:
    prefill, decode = Foreign("prefill"), Foreign("decode")
    sender, receiver = KVSender(prefill, "", 1), KVReceiver(decode, "127.0.0.1:1", 1)
    assert receiver.poll() is KVPoll.WaitingForInput
    receiver.init([3, 4])
    assert receiver.poll() is KVPoll.WaitingForInput
    sender.init(2)
    sender.send([1, 2])
    sender.abort()
    receiver.abort()
    assert prefill.asked == ["claim", "send [1, 2]", "fail ROOM_CANCELLED"]
    assert decode.asked == ["open 1 127.0.0.1:1", "write [3, 4]", "give_way", "fail ROOM_CANCELLED"]


def test_an_end_that_comes_during_an_abort_stays() -> None:
    """Another thread of the engine may have seen it."""
    decode = Foreign("decode")
    receiver = KVReceiver(decode, "127.0.0.1:1", 1)
    handle = receiver._handle
    aborting = threading.Thread(target=receiver.abort)
    assert handle.claim()
    aborting.start()
    aborting.join(0.1)
    assert aborting.is_alive()  # it has found the room open, and the loop about to end it
    handle.poll = KVPoll.Success
    aborting.join(10.0)
    assert (receiver.poll(), receiver.failure) == (KVPoll.Success, None)
    assert "fail ROOM_CANCELLED" not in decode.asked


def test_an_abort_that_comes_before_a_claim_ends_the_room_although_both_saw_each_other() -> None:
    decode = Foreign("decode")
    receiver = KVReceiver(decode, "127.0.0.1:1", 1)
    handle = receiver._handle
    aborting = threading.Thread(target=receiver.abort)
    assert handle.claim()
    aborting.start()
    wait_until(lambda: handle.aborting is not None)
    handle.turn(KVPoll.Success)
    aborting.join(10.0)
    assert receiver.poll() is KVPoll.Failed and "fail ROOM_CANCELLED" in decode.asked


def test_an_end_that_was_seen_never_changes_however_threads_meet() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            receiver = KVReceiver(Foreign("decode"), "127.0.0.1:1", 1)
            seen: set[tuple[KVPoll, str]] = set()
            start = threading.Barrier(4)

            def look(receiver: KVReceiver = receiver, start: threading.Barrier = start, seen: Any = seen) -> None:
                start.wait(10.0)
                while not receiver.ended:
                    pass
                for _ in range(20):
                    seen.add((receiver.poll(), receiver.failure.message if receiver.failure else ""))

            def succeed(receiver: KVReceiver = receiver, start: threading.Barrier = start) -> None:
                start.wait(10.0)
                receiver._handle.turn(KVPoll.Success)

            def abort(why: str, receiver: KVReceiver = receiver, start: threading.Barrier = start) -> None:
                start.wait(10.0)
                receiver.abort(why)

            calls: list[tuple[Any, ...]] = [(look,), (succeed,), (abort, "one"), (abort, "another")]
            threads = [threading.Thread(target=call, args=arguments) for call, *arguments in calls]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10.0)
            assert len(seen) == 1, seen
    finally:
        sys.setswitchinterval(before)


def test_an_abort_that_comes_before_the_end_stays() -> None:
    sender = KVSender(Foreign("prefill"), "", 1)
    handle = sender._handle
    sender.abort("too late")
    handle.turn(KVPoll.Success)
    assert (sender.poll(), handle.poll) == (KVPoll.Failed, KVPoll.Bootstrapping)
    assert sender.failure is not None and sender.failure.message == "too late"


def test_a_fork_during_the_end_of_a_room_leaves_a_child_that_can_end_its_handles() -> None:
    code = (
        "import os, sys, threading\n"
        "from kvgrpc.transfer.protocol.types import POLL_FAILED\n"
        "from kvgrpc.transfer.runtime.boundary import EngineHandle\n"
        "from kvgrpc.transfer.runtime.timed_handle import waiters_lock\n"
        "held, go_on = threading.Event(), threading.Event()\n"
        "def end_a_room():\n"
        "    with waiters_lock:\n"
        "        held.set()\n"
        "        go_on.wait(0.2)\n"
        "threading.Thread(target=end_a_room).start()\n"
        "held.wait()\n"
        "child = os.fork()\n"
        "if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "handle = EngineHandle()\n"
        "handle.turn(POLL_FAILED)\n"
        "print('ended in the child', flush=True)\n"
        "os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ended in the child\n"), done.stderr


def test_the_boundary_names_values_and_no_record_of_a_core() -> None:
    """A runtime in another language keeps records of its own."""
    tree = ast.parse(inspect.getsource(boundary))
    imported = {each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) and each.module}
    ours = {name.removeprefix("kvgrpc.transfer.") for name in imported if name.startswith("kvgrpc.transfer.")}
    assert ours == {"aux_rows", "layout.pools", "layout.topology", "protocol.types", "runtime.timed_handle", "tables"}


def test_the_role_says_whose_it_is() -> None:
    prefill, decode = Foreign("prefill"), Foreign("decode")
    assert (prefill_of(prefill), prefill_of(decode)) == (prefill, None)
