"""SGLang's receiver of one request at decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import BaseKVReceiver

from kvgrpc.engines.addresses import registry_of
from kvgrpc.engines.sglang.failure import transfer_error
from kvgrpc.errors import Failure, Reason
from kvgrpc.transfer import KVPoll, KVReceiver

if TYPE_CHECKING:
    from kvgrpc.engines.sglang.manager import KvGrpcManager


class KvGrpcReceiver(BaseKVReceiver):
    """Only ``failure_exception`` raises, as SGLang asks; nothing blocks."""

    require_staging = False
    # Whose acknowledgements SGLang would count before it gives pages back; we ask the receiver instead.
    bootstrap_infos: tuple[()] = ()

    def __init__(self, mgr: KvGrpcManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = 0 if bootstrap_room is None else bootstrap_room
        self.abort_notified = False
        self._attempt = mgr.attempt
        self._bootstrap_addr = bootstrap_addr
        self._receiver: KVReceiver | None = None
        self._given_up = False
        self._reason: Failure | None = None  # why it ended before there was a receiver, or in another stage
        self._has_pages = False

    def init(self, prefill_dp_rank: int) -> None:
        """``prefill_dp_rank``: the router's choice, or the room itself for "by the room" (see EveryPrefill)."""
        if self._reason is None:
            self._receiver = KVReceiver(
                self.kv_mgr.transfer,
                registry_of(self._bootstrap_addr, self.kv_mgr.external_registry),
                self.bootstrap_room,
                self._attempt,
                prefill_dp_rank=None if prefill_dp_rank == self.bootstrap_room else prefill_dp_rank,
            )

    def poll(self) -> KVPoll:
        if self._given_up:
            return KVPoll.Failed
        if self._receiver is None:
            return KVPoll.Bootstrapping if self._reason is None else KVPoll.Failed
        return self._receiver.poll()

    def send_metadata(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        **unsupported: Any,
    ) -> None:
        """Gives the pages behind the prefix of ``decode_prefix_len`` tokens that this engine holds already."""
        if self._receiver is None:
            return
        prefix_pages, rest = divmod(decode_prefix_len or 0, self.kv_mgr.page_tokens)
        unsupported = {name: value for name, value in unsupported.items() if value is not None and value is not False}
        if rest or unsupported:
            self.abort(f"kvgrpc serves prefixes of whole pages and no {', '.join(unsupported) or decode_prefix_len}")
            return
        self._has_pages = True
        self._receiver.init(self.kv_mgr.pages_of_pools(kv_indices, state_indices), aux_index, prefix_pages)

    def failure_exception(self) -> None:
        """Raises the reason. Where another rank failed this one gives up too, so that its pages come back."""
        failure = self.failure
        self.abort("another rank of this decode engine failed")
        raise transfer_error(self.bootstrap_room, failure)

    @property
    def failure(self) -> Failure | None:
        """The root cause, also of another pipeline stage; None while there is none, or where another rank has it."""
        return self._reason if self._receiver is None or self._given_up else self._receiver.failure

    def abort(self, why: str = "the decode engine aborted it") -> None:
        if self._receiver is None:
            self._reason = self._reason or Failure(Reason.ROOM_CANCELLED, why)
        else:
            self._receiver.abort(why)

    def give_up(self, why: Failure | None) -> None:
        """Fails it here, also where its pages have come: another pipeline stage has none, for the reason ``why``."""
        self._reason, self._given_up = self.failure or why, True
        self.abort("another pipeline stage of this decode engine failed")

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """SGLang asks before it decides whether the pages must be held: yes, while somebody may write to them."""
        if self._receiver is not None and self._has_pages:
            self.abort()
            self.abort_notified = True
            self.kv_mgr.defer_release(self.bootstrap_room, self._receiver)

    def clear(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
