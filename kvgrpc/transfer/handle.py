"""What KVSender and KVReceiver, the engine's two ends of a hand-off, share: how it went, and how to give it up."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from kvgrpc.errors import Failure, InvalidRequest, KvGrpcError, WrongRank
from kvgrpc.transfer.protocol import failures
from kvgrpc.transfer.protocol.types import MAX_ROOM, POLL_FAILED, POLL_SUCCESS, Handle, KVPoll, RoomKey
from kvgrpc.transfer.runtime.manager import TransferManager


class TransferHandle(ABC):
    """For one engine thread at a time; ``poll``, ``failure``, ``release_safe`` and ``abort`` for any.

    Every call is an append and a wake: it never blocks, and only ``failure_exception`` raises.
    """

    __slots__ = ("__weakref__", "_closed", "_handle", "_transfer", "attempt", "room")
    _engine = ""

    def __init__(self, manager: TransferManager[Any], key: RoomKey, handle: Handle) -> None:
        self.room, self.attempt = key
        self._transfer = manager
        self._handle = handle
        handle.began = time.monotonic()
        self._closed = False

    def poll(self) -> KVPoll:
        """Where the room is; a plain read. Terminal states stay."""
        handle = self._handle
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

    def failure_exception(self) -> None:
        """Raises the failure as its exception; nothing when there is none."""
        failure = self.failure
        if failure is not None:
            raise failure.exception()

    def abort(self, why: str = "") -> None:
        """Failed at once; alone sufficient, harmless when repeated or late. ``why`` becomes the failure's message."""
        if not self.ended:
            message = why or f"the {self._engine} engine aborted it"
            failure = failures.cancelled(RoomKey(self.room, self.attempt), message, self._transfer.ref)
            with self._transfer.aborting:
                self._handle.aborted = failure
            self._fail(failure)

    def close(self) -> None:
        """Drops the handle; a room that has not ended is aborted. ``poll`` and ``failure`` stay readable."""
        if not self._closed:
            self._closed = True
            self.abort(f"the {self._engine} engine closed its handle")

    @abstractmethod
    def _fail(self, failure: Failure) -> None:
        """Tells the manager."""

    def _queue_full(self) -> bool:
        """Whether too many calls wait for the loop thread; the room has failed then."""
        if not self._transfer.queue_full:
            return False
        self._fail(self._transfer.overflow(RoomKey(self.room, self.attempt)))
        return True

    def _refused(self) -> bool:
        """Whether there can be no such room here now; the handle has failed then."""
        key = RoomKey(self.room, self.attempt)
        refusal = _no_key(key) or self._wrong_role() or self._transfer.refusal(key)
        if refusal is None:
            return False
        self._handle.release_safe = True
        self._handle.fail(refusal)
        return True

    def _wrong_role(self) -> Failure | None:
        """Why a manager of the other role has no such handle."""
        role = self._transfer.role
        if role == self._engine:
            return None
        text = f"{type(self).__name__} needs a {self._engine} rank, {self._transfer.ref} is a {role} rank"
        error = WrongRank(text, metadata={"expected": self._engine.upper(), "actual": role.upper()})
        return Failure.of(error, str(self._transfer.ref))

    def _reject(self, error: KvGrpcError) -> None:
        """Fails the room for what its engine asked."""
        self._fail(Failure.of(error, str(self._transfer.ref)))


def _no_key(key: RoomKey) -> Failure | None:
    """Why a room or attempt cannot be one; engines read room 0 as "nothing was written"."""
    if not isinstance(key.room, int) or not 0 < key.room <= MAX_ROOM:
        return Failure.of(InvalidRequest.of("room", key.room, "1 to 2^63-1"))
    if not hasattr(key.attempt, "__index__") or not 0 <= key.attempt < 2**32:
        return Failure.of(InvalidRequest.of("attempt", key.attempt, "0 to 2^32-1", room=key.room))
    return None
