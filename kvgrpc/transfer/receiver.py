"""The engine's end of a hand-off at decode. Its calls append and wake: none waits for a peer, and none raises."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy.typing as npt

from kvgrpc.errors import InvalidRequest
from kvgrpc.transfer.handle import TransferHandle, as_int, as_number, room_key
from kvgrpc.transfer.layout.pools import copy_of
from kvgrpc.transfer.protocol.types import POLL_WAITING_FOR_INPUT, KVPoll
from kvgrpc.transfer.runtime.boundary import DecodeRuntime, EngineHandle, RoomRequest


class KVReceiver(TransferHandle):
    """Receives one room's pages from the prefill that the router chose.

    For one engine thread at a time; ``poll``, ``failure`` and ``abort`` for any. Only ``failure_exception`` raises.
    Construction resolves and dials in the background: ``poll`` says WaitingForInput when pages may be allocated, which
    is at once where the sessions are up already. ``init`` may be called before that: its pages are sent to prefill as
    soon as there is a session.

    Args:
        manager: ``rank.transfer`` of a decode rank.
        bootstrap_addr: the registry of the prefill engine, "host:port", optionally "/engine".
        room: chosen by the router, 1 to 2^63 - 1.
        attempt: higher after the router retries with the same room.
        prefill_dp_rank: which dp rank of prefill; None: room % dp.
        traceparent: W3C trace context of the request.
    """

    __slots__ = ("_initialised",)
    _engine = "decode"
    _transfer: DecodeRuntime

    def __init__(
        self,
        manager: DecodeRuntime,
        bootstrap_addr: str,
        room: int,
        attempt: int = 0,
        prefill_dp_rank: int | None = None,
        traceparent: str = "",
    ) -> None:
        key, handle = room_key(room, attempt), EngineHandle()
        super().__init__(manager, key, handle)
        self._initialised = False
        if not self._refused(key):
            dp = None if prefill_dp_rank is None else as_int(prefill_dp_rank)
            request = RoomRequest(key, bootstrap_addr, dp, traceparent)
            if manager.stands(request):
                handle.poll = POLL_WAITING_FOR_INPUT
            manager.open(handle, request)

    def poll(self) -> KVPoll:
        handle = self._handle
        if handle.poll is POLL_WAITING_FOR_INPUT and not handle.moving_at and handle.aborted is None:
            return POLL_WAITING_FOR_INPUT  # for its engine: no thread of ours moves it on
        return super().poll()

    poll.__doc__ = TransferHandle.poll.__doc__

    def init(
        self, pages: npt.ArrayLike | Mapping[str, npt.ArrayLike], aux_index: int | None = None, first_page: int = 0
    ) -> None:
        """Says into which pages the prompt's KV cache shall be written. Once.

        The pages and the aux row belong to the room from now on, until Success, or after a failure until
        ``release_safe``.

        Args:
            pages: int32[n] page numbers of this rank's pool in the order of the prompt, copied before return; none for
                a full prefix hit. A page may occur only once. The numbers address every pool. Where pools have pages
                of their own (recurrent state, a sliding window), a mapping of pool names to such lists; those of the
                first pool are the prompt's.
            aux_index: row of the aux buffers.
            first_page: logical page of the prompt that pages[0] stands for: how many pages this rank already holds.
        """
        again, self._initialised = self._initialised, True
        if self.ended or self._queue_full():
            return
        if again:
            return self._reject(InvalidRequest.of("init", "a second call", "one call of init", room=self.room))
        self._handle.moving_at = time.monotonic()
        try:
            copied = copy_of(pages, self._transfer.pool_names)
            first = as_number(first_page, "first_page")
            row = None if aux_index is None else as_number(aux_index, "aux_index")
        except Exception as error:
            self._reject(error)
            return
        self._transfer.write(self._handle, copied, first, row)

    @property
    def prefill_ready(self) -> bool:
        """True once prefill's sender of this room exists (all senders, where several prefill ranks owe parts of it).

        An engine that is short of pages may delay ``init`` until then. It may stay False for a room whose ``init``
        came at once.
        """
        return self._handle.prefill_ready

    def close(self) -> None:
        """See ``TransferHandle.close``. The room's pages stay held until ``release_safe``."""
        super().close()
        self._handle.closed = True

    def _dropped(self) -> None:
        super()._dropped()
        self._handle.closed = True
