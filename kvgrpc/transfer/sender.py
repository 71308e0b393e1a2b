"""The engine's end of a hand-off at prefill. Every call is an append and a wake: it never blocks and never raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy.typing as npt

from kvgrpc.errors import Failure, InvalidRequest, KvGrpcError, Reason, RoomCancelled
from kvgrpc.transfer.model import MAX_ROOM, Align, KVPoll, RoomKey
from kvgrpc.transfer.pages import as_pages
from kvgrpc.transfer.prefill_core import Chunk

if TYPE_CHECKING:
    from kvgrpc.transfer.prefill import PrefillManager


class KVSender:
    """Sends one room's pages to whichever decode named the room (seed 002's sender).

    For one engine thread at a time; ``poll``, ``failure`` and ``abort`` for any. Only ``failure_exception`` raises.

    Args:
        manager: ``rank.transfer`` of a prefill rank.
        bootstrap_addr: accepted as in the seed; prefill registers at start and does not need it.
        room: chosen by the router, 1 to 2^63 - 1.
        attempt: higher after the router retries with the same room.
    """

    def __init__(self, manager: PrefillManager, bootstrap_addr: str, room: int, attempt: int = 0) -> None:
        from kvgrpc.transfer.prefill import SenderHandle

        self.room, self.attempt = room, attempt
        self._manager = manager
        self._handle = SenderHandle()
        self._aux_index: int | None = None
        self._total: int | None = None
        self._sent = 0
        self._initialised = False
        self._closed = False
        key = RoomKey(room, attempt)
        refusal = check_key(key) or manager.refusal(key)
        if refusal is not None:
            self._refuse(refusal)
        else:
            manager.post(manager.claim, key, self._handle)

    def init(self, num_pages: int | None, aux_index: int | None = None, align: Align = Align.HEAD) -> None:
        """Says how many pages will be sent in all (None: ``is_last`` says it) and which aux row goes with the last.

        Where decode asks for fewer pages it gets the last ones with ``Align.TAIL``. With ``Align.HEAD`` it gets the
        first ones, or, where it holds a prefix already, those behind the prefix.
        """
        self._total, self._aux_index, self._initialised = num_pages, aux_index, True
        self._manager.post(self._manager.expect, self._handle, num_pages, align)

    def send(
        self,
        pages: npt.ArrayLike,
        index_slice: slice | None = None,
        is_last: bool | None = None,
        wait: Callable[[], None] | None = None,
    ) -> None:
        """Queues pages that are computed; slices may come in any order.

        Args:
            pages: int32[n] page numbers of this rank's pool (also a list or a CPU tensor), copied before return.
            index_slice: their positions in the room; None: after what was sent.
            is_last: None: when the count of ``init`` is reached. The aux row is read in the last call.
            wait: runs on the transfer thread before the pages are read.
        """
        if self.poll() in (KVPoll.Failed, KVPoll.Success):
            return
        try:
            numbers = as_pages(pages)
            start = self._start(index_slice, len(numbers))
            self._sent += len(numbers)
            last = (self._total is not None and self._sent >= self._total) if is_last is None else is_last
            aux = self._manager.aux.read(self._aux_index) if last else None
        except KvGrpcError as error:
            self._manager.post(self._manager.fail, self._handle, Failure.of(error, str(self._manager.ref)))
            return
        self._manager.post(self._manager.send, self._handle, Chunk(numbers, start, last, wait), aux)

    def poll(self) -> KVPoll:
        """Where the room is; a plain read. Terminal states stay."""
        if self._handle.aborted is not None:
            return KVPoll.Failed
        poll = self._handle.poll
        return KVPoll.WaitingForInput if poll is KVPoll.Bootstrapping and self._initialised else poll

    @property
    def failure(self) -> Failure | None:
        """The root cause, once ``poll`` says Failed."""
        return self._handle.aborted or self._handle.failure

    def failure_exception(self) -> None:
        """Raises the failure as its exception; nothing when there is none."""
        failure = self.failure
        if failure is not None:
            raise failure.exception()

    @property
    def decode_prefix_pages(self) -> int:
        """Pages that decode already holds, once ``poll`` says WaitingForInput."""
        return self._handle.prefix_pages

    @property
    def release_safe(self) -> bool:
        """True once nothing reads the source pages any more."""
        return self._handle.release_safe

    def abort(self, why: str = "the prefill engine aborted it") -> None:
        """Failed at once; alone sufficient, harmless when repeated or late."""
        if self.poll() not in (KVPoll.Failed, KVPoll.Success):
            failure = cancelled(RoomKey(self.room, self.attempt), why, str(self._manager.ref))
            self._handle.aborted = failure
            self._manager.post(self._manager.fail, self._handle, failure)

    def close(self) -> None:
        """Drops the handle; a room that has not ended is aborted."""
        if not self._closed:
            self._closed = True
            self.abort("the prefill engine closed its sender")

    def _start(self, index_slice: slice | None, count: int) -> int:
        if index_slice is None:
            return self._sent
        start = index_slice.start or 0
        stop = start + count if index_slice.stop is None else index_slice.stop
        if start < 0 or stop - start != count or index_slice.step not in (None, 1):
            raise InvalidRequest(
                f"send: index_slice {index_slice} does not fit {count} pages",
                metadata={"field": "index_slice", "value": index_slice, "room": self.room},
            )
        return start

    def _refuse(self, failure: Failure) -> None:
        self._handle.release_safe = True
        self._handle.fail(failure)


def check_key(key: RoomKey) -> Failure | None:
    """Why a room or attempt cannot be one; engines read room 0 as "nothing was written"."""
    whole = isinstance(key.room, int) and hasattr(key.attempt, "__index__")
    if whole and 0 < key.room <= MAX_ROOM and 0 <= key.attempt < 2**32:
        return None
    text = f"room must be 1 to 2^63-1 and attempt 0 to 2^32-1, not {key.room!r} and {key.attempt!r}"
    return Failure(Reason.INVALID_REQUEST, text, {"field": "room", "value": str(key.room)})


def cancelled(key: RoomKey, why: str, by: str) -> Failure:
    """The failure of an abort."""
    error = RoomCancelled(why, metadata={"room": key.room, "attempt": key.attempt, "by": by})
    return Failure.of(error, by)
