"""The engine's end of a hand-off at prefill. Its calls append and wake: none waits for a peer, and none raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy.typing as npt

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import ENGINE_NAME
from kvgrpc.transfer.handle import TransferHandle, as_number, room_key, whole_number
from kvgrpc.transfer.layout.pools import copy_of, count_of
from kvgrpc.transfer.protocol.types import POLL_BOOTSTRAPPING, POLL_WAITING_FOR_INPUT, Align, KVPoll
from kvgrpc.transfer.runtime.boundary import EngineHandle, PrefillRuntime, SentPages


class KVSender(TransferHandle):
    """Sends one room's pages to whichever decode named the room.

    For one engine thread at a time; ``poll``, ``failure`` and ``abort`` for any. Only ``failure_exception`` raises.

    Args:
        manager: ``rank.transfer`` of a prefill rank.
        bootstrap_addr: not used; accepted because engines pass it to both ends.
        room: chosen by the router, 1 to 2^63 - 1. Required.
        attempt: higher after the router retries with the same room.
        decode: the engine that the router chose for the room, where this one knows: no other engine's decode gets its
            pages then, or ends it (docs/session.md, rule 10). Empty: whichever decode names the room.
    """

    __slots__ = ("_aux_index", "_expectation", "_initialised", "_sent", "_total")
    _engine = "prefill"
    _transfer: PrefillRuntime

    def __init__(
        self, manager: PrefillRuntime, bootstrap_addr: str = "", room: int = 0, attempt: int = 0, decode: str = ""
    ) -> None:
        handle = EngineHandle()
        key = room_key(room, attempt)
        super().__init__(manager, key, handle)
        self._aux_index: int | None = None
        self._total: int | None = None
        # What init said, until it is told with the next send: the pages wait for it, nothing else does.
        self._expectation: tuple[int | None, Align] | None = None
        self._sent = 0
        self._initialised = False
        if not self._refused(key):
            manager.claim(key, handle, decode if isinstance(decode, str) else "")
            if not isinstance(decode, str) or (decode and not ENGINE_NAME.fullmatch(decode)):
                self._reject(InvalidRequest.of("decode", decode, "the name of an engine, or empty", room=self.room))

    def init(self, num_pages: int | None, aux_index: int | None = None, align: Align = Align.HEAD) -> None:
        """Says how many pages will be sent, and which aux row is sent with the last of them. Once, before ``send``.

        ``num_pages`` None: the ``send`` with ``is_last`` ends the room. Where decode asks for fewer pages than are
        sent, it gets the last ones with ``Align.TAIL``. With ``Align.HEAD`` it gets the first ones, or, where it holds
        a prefix already, those behind the prefix. Where pools have pages of their own, ``Align.TAIL`` is for each of
        them, and nothing is written before the last ``send``; else the other pools get as many pages as decode wants.
        Where decode's pages are several of ours (more tokens each), ``num_pages`` are ours, and it is ``Align.HEAD``.
        """
        again, self._initialised = self._initialised, True
        if self.ended:
            return
        if again:
            return self._reject(InvalidRequest.of("init", "a second call", "one call of init", room=self.room))
        try:
            total = None if num_pages is None else whole_number(num_pages, "num_pages", 2**32)
            row = None if aux_index is None else as_number(aux_index, "aux_index")
        except InvalidRequest as error:
            self._reject(error)
            return
        if not isinstance(align, Align):
            self._reject(InvalidRequest.of("align", align, "Align.HEAD or Align.TAIL", room=self.room))
        else:
            self._total, self._aux_index = total, row
            self._expectation = total, align

    def send(
        self,
        pages: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        index_slice: slice | None = None,
        is_last: bool | None = None,
        wait: Callable[[], None] | None = None,
    ) -> None:
        """Queues pages that are computed; slices may come in any order.

        Args:
            pages: int32[n] page numbers of this rank's pool (also a list or a CPU tensor), copied before return. Where
                pools have pages of their own, a mapping of pool names to such lists, as in ``KVReceiver.init``.
                ``index_slice`` counts the first pool's pages; those of the other pools follow the ones of earlier
                calls, and there must be as many in the end as decode gave, or with ``Align.TAIL`` as many or more.
            index_slice: positions of these pages in the room; None: after those that were sent before.
            is_last: whether this is the last call; None: it is when the count of ``init`` is reached. The aux row is
                read in the last call.
            wait: called on the transfer thread before the pages are read. No write of this rank begins while it
                blocks, and after 5 s the rank is not healthy.
        """
        if self.ended or self._queue_full():
            return
        if not self._initialised:
            rule = "init first, which says how many pages there are; None where nobody knows"
            return self._reject(InvalidRequest.of("send", "before init", rule, room=self.room))
        try:
            copied = copy_of(pages, self._transfer.pool_names)
            count = count_of(copied)
            start = self._start(index_slice, count)
            self._sent += count
            last = (self._total is not None and self._sent >= self._total) if is_last is None else bool(is_last)
            aux = self._transfer.aux.read(self._aux_index) if last else None
        except Exception as error:
            self._reject(error)
            return
        expectation, self._expectation = self._expectation, None
        self._transfer.send(self._handle, SentPages(copied, start, last, wait), aux, expectation)

    def poll(self) -> KVPoll:
        """See ``TransferHandle.poll``. At least WaitingForInput once ``init`` was called."""
        poll = super().poll()
        return POLL_WAITING_FOR_INPUT if poll is POLL_BOOTSTRAPPING and self._initialised else poll

    @property
    def decode_prefix_pages(self) -> int | None:
        """The number of the prompt's pages that decode already holds; None until decode has said where its pages are.

        ``poll`` does not show whether decode has: it is at least WaitingForInput once ``init`` was called.
        """
        return self._handle.prefix_pages

    def _start(self, index_slice: slice | None, count: int) -> int:
        if index_slice is None:
            return self._sent
        if isinstance(index_slice, slice) and index_slice.step in (None, 1):
            start = 0 if index_slice.start is None else index_slice.start
            stop = index_slice.stop
            if hasattr(start, "__index__") and start >= 0 and (stop is None or stop == start + count):
                return int(start)
        raise InvalidRequest.of("index_slice", index_slice, f"a slice of {count} positions", room=self.room)
