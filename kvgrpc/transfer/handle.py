"""The common part of KVSender and KVReceiver, the engine's ends of a hand-off: how it went, and how to give it up."""

from __future__ import annotations

import asyncio
import contextlib
import math
import operator
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from kvgrpc.errors import Failure, InvalidRequest, KvGrpcError, WrongRank
from kvgrpc.rpc.within import check_seconds
from kvgrpc.transfer.protocol import failures
from kvgrpc.transfer.protocol.types import MAX_ROOM, POLL_FAILED, POLL_SUCCESS, KVPoll, RoomKey
from kvgrpc.transfer.runtime.boundary import EngineHandle, Runtime
from kvgrpc.transfer.runtime.timed_handle import waiters_lock

Made = TypeVar("Made", bound="TransferHandle")


class TransferHandle:
    """For one engine thread at a time; ``poll``, ``failure``, ``release_safe`` and ``abort`` for any.

    A context manager that closes it. One that is dropped before its end fails its room, with a ResourceWarning: nobody
    could learn any more when its pages are free.

    No call waits for a peer or for the loop, and only ``failure_exception`` raises; ``poll`` may sleep for 50 us.
    ``wait`` blocks, and refuses a time that is no number.
    """

    __slots__ = ("__weakref__", "_closed", "_handle", "_transfer", "_waiters", "attempt", "room")
    _engine = ""

    def __init__(self, manager: Runtime, key: RoomKey, handle: EngineHandle) -> None:
        self.room, self.attempt = key.room, key.attempt
        self._transfer = manager
        self._handle = handle
        handle.began = time.monotonic()
        handle.on_change = manager.on_change
        self._waiters: tuple[Callable[[], object], ...] = ()
        self._closed = False

    def poll(self) -> KVPoll:
        """The state of the room. Terminal states stay.

        While the room is open and a thread of kvgrpc waits for the interpreter, which the caller was seen to let nobody
        have between two looks, the caller lends it: it sleeps for 50 us, once in 200 us of this manager and once after
        calls that gave it work, however many rooms it looks at (``RankConfig.poll_gives_way``).
        """
        handle = self._handle
        poll = handle.poll
        if poll is not POLL_SUCCESS and poll is not POLL_FAILED and handle.aborted is None:
            self._transfer.give_way()
        return POLL_FAILED if handle.aborted is not None else handle.poll

    @property
    def ended(self) -> bool:
        """True once ``poll`` says Failed or Success."""
        handle = self._handle
        poll = handle.poll
        return poll is POLL_SUCCESS or poll is POLL_FAILED or handle.aborted is not None

    @property
    def failure(self) -> Failure | None:
        """The root cause, once ``poll`` says Failed."""
        return self._handle.aborted or self._handle.failure

    @property
    def release_safe(self) -> bool:
        """True once the room's pages may be reused: nothing reads those of a sender, or can write to a receiver's."""
        return self._handle.release_safe

    @property
    def pages_done(self) -> int:
        """Pages in place at decode, a prefix of them; it grows while ``poll`` says Transferring."""
        return self._handle.pages_done

    def wait(self, timeout: float, until: KVPoll = KVPoll.Success) -> KVPoll:
        """Blocks until ``poll`` is at least ``until``, or Failed; at most ``timeout`` seconds (``math.inf``: for ever).
        Returns ``poll``. Raises InvalidRequest for NaN.

        With ``until=KVPoll.WaitingForInput`` a receiver waits until its pages may be allocated. Must not be called on
        the thread of kvgrpc's own loop.
        """
        check_seconds("timeout", max(timeout, 0.0), math.inf)
        end, news = time.monotonic() + timeout, threading.Event()

        def wake() -> None:
            if self._is_at(until):
                news.set()

        with self._woken(wake):
            while not self._reached(until) and (left := end - time.monotonic()) > 0:
                news.wait(min(left, threading.TIMEOUT_MAX))
                news.clear()
        return self.poll()

    async def wait_async(self, timeout: float, until: KVPoll = KVPoll.Success) -> KVPoll:
        """Waits as ``wait`` does, on the engine's own asyncio loop."""
        check_seconds("timeout", max(timeout, 0.0), math.inf)
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if self._is_at(until) or loop.is_closed():  # a closed one raises: it is let go
                loop.call_soon_threadsafe(news.set)

        with self._woken(wake):
            if not self._reached(until):
                late = loop.call_later(max(timeout, 0.0), news.set)
                try:
                    await news.wait()
                finally:
                    late.cancel()
        return self.poll()

    def failure_exception(self) -> None:
        """Raises the failure as its exception; nothing when there is none."""
        failure = self.failure
        if failure is not None:
            raise failure.exception()

    def abort(self, why: str = "") -> None:
        """Fails the room at once, with ``why`` as the message. No other call is needed; repeats are harmless."""
        if not self.ended:
            message = failures.in_words(why) or f"the {self._engine} engine aborted it"
            failure = failures.cancelled(RoomKey(self.room, self.attempt), message, self._transfer.ref)
            if self._handle.give_up(failure):
                self._fail(failure)

    def close(self) -> None:
        """Drops the handle; a room that has not ended is aborted. ``poll`` and ``failure`` stay readable."""
        if not self._closed:
            self._closed = True
            self.abort(f"the {self._engine} engine closed its handle")

    def __enter__(self: Made) -> Made:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Wherever the garbage collector runs, under any lock: so it appends for the loop, and takes no lock itself.
        if getattr(self, "_closed", True) or self.ended or sys.is_finalizing():
            return
        what = f"{type(self).__name__} of room {self.room}"
        warnings.warn(f"{what} was dropped before its end, and not closed", ResourceWarning, source=self, stacklevel=2)
        self._dropped()

    def _dropped(self) -> None:
        message = f"the {self._engine} engine dropped its handle"
        self._fail(failures.cancelled(RoomKey(self.room, self.attempt), message, self._transfer.ref))

    def _reached(self, until: KVPoll) -> bool:
        poll = self.poll()
        return poll is POLL_FAILED or poll >= until

    def _is_at(self, until: KVPoll) -> bool:
        """``_reached`` for whoever changed it, who lends nothing: changes that nobody waits for wake nobody."""
        handle = self._handle
        return handle.aborted is not None or handle.poll is POLL_FAILED or handle.poll >= until

    @contextlib.contextmanager
    def _woken(self, wake: Callable[[], object]) -> Iterator[None]:
        """``wake`` is called after each change from now on. Whoever waits looks first: a change may be over."""
        with waiters_lock:
            self._waiters = (*self._waiters, wake)
            self._handle.on_change = self._on_change
        try:
            yield
        finally:
            self._wake_no_more(wake)

    def _wake_no_more(self, wake: Callable[[], object], patient: bool = True) -> None:
        if not waiters_lock.acquire(blocking=patient):
            return
        try:
            self._waiters = tuple(each for each in self._waiters if each is not wake)
            if not self._waiters:
                self._handle.on_change = self._transfer.on_change
        finally:
            waiters_lock.release()

    def _on_change(self) -> None:
        """On the loop thread, mostly; the engine's where the room was refused at once."""
        for wake in self._waiters:
            try:
                wake()
            except RuntimeError:  # the engine's asyncio loop is closed: who waited there may never come to its end
                self._wake_no_more(wake, patient=False)  # the next change tries again
        on_change = self._transfer.on_change
        if on_change is not None:
            on_change()

    def _fail(self, failure: Failure) -> None:
        self._transfer.fail(self._handle, failure)

    def _queue_full(self) -> bool:
        """True if too many calls wait for the loop thread; the room has failed then."""
        if not self._transfer.queue_full:
            return False
        self._fail(self._transfer.overflow(RoomKey(self.room, self.attempt)))
        return True

    def _refused(self, key: RoomKey) -> bool:
        """True if there can be no such room here now; the handle has failed then."""
        manager = self._transfer
        refusal = _no_key(key) or (self._wrong_role() if manager.role != self._engine else manager.refusal(key))
        if refusal is None:
            return False
        self._handle.release_safe = True
        self._handle.fail(refusal)
        return True

    def _wrong_role(self) -> Failure:
        """Why a manager of the other role has no such handle."""
        role = self._transfer.role
        text = f"{type(self).__name__} needs a {self._engine} rank, {self._transfer.ref} is a {role} rank"
        error = WrongRank(text, metadata={"expected": self._engine.upper(), "actual": role.upper()})
        return Failure.of(error, str(self._transfer.ref))

    def _reject(self, error: Exception) -> None:
        """Fails the room for what its engine asked: engine threads never see an exception."""
        if not isinstance(error, KvGrpcError):  # foreign objects raise anything when they are looked at
            error = InvalidRequest.of("arguments", failures.raised(error), "values of the documented types")
        self._fail(Failure.of(error, str(self._transfer.ref)))


def room_key(room: Any, attempt: Any) -> RoomKey:
    """Whole numbers of any library become ints; anything else stays, for the handle to refuse."""
    if type(room) is int and type(attempt) is int:
        return RoomKey(room, attempt)
    return RoomKey(as_int(room), as_int(attempt))


def whole_number(value: Any, field: str, below: int) -> int:
    """Raises InvalidRequest for what is no whole number from 0 on, below ``below``."""
    number = as_int(value)
    if type(number) is not int or not 0 <= number < below:
        raise InvalidRequest.of(field, value, f"a whole number from 0 to {below - 1}")
    return number


def as_number(value: Any, field: str) -> int:
    """A whole number of any library as an int: nothing of an engine's own goes to the loop, not to be compared either.

    Raises InvalidRequest for anything else.
    """
    number = as_int(value)
    if type(number) is not int:
        raise InvalidRequest.of(field, value, "a whole number")
    return number


def as_int(value: Any) -> Any:
    """An int where the value is a whole number of any library, else the value."""
    if type(value) is int:
        return value
    try:
        return operator.index(value)
    except Exception:
        return value


def _no_key(key: RoomKey) -> Failure | None:
    """Why a room or attempt cannot be one; engines read room 0 as "nothing was written"."""
    if type(key.room) is not int or not 0 < key.room <= MAX_ROOM:
        return Failure.of(InvalidRequest.of("room", key.room, "1 to 2^63-1"))
    if type(key.attempt) is not int or not 0 <= key.attempt < 2**32:
        return Failure.of(InvalidRequest.of("attempt", key.attempt, "0 to 2^32-1", room=key.room))
    return None
