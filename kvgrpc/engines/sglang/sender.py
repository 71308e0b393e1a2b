"""SGLang's sender of one request at prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import BaseKVSender, KVTransferMetric

from kvgrpc.engines.sglang.failure import transfer_error
from kvgrpc.transfer import KVPoll, KVSender

if TYPE_CHECKING:
    from kvgrpc.engines.sglang.manager import KvGrpcManager


class KvGrpcSender(BaseKVSender):
    """Only ``failure_exception`` raises, as SGLang asks; nothing blocks."""

    def __init__(
        self,
        mgr: KvGrpcManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        **unused: Any,
    ) -> None:
        """``unused``: SGLang's own address of decode (until 0.5.21), and who chose the dp rank; we find both."""
        self.kv_mgr = mgr
        self._sender = KVSender(mgr.transfer, bootstrap_addr, bootstrap_room, mgr.attempt)
        self._stages = mgr.stages
        if self._stages is not None:
            self._stages.add(self._sender)
        self._bytes_sent = 0
        # SGLang sets a CUDA event here when the pages of the next send are still being computed.
        self._early_send_wait_event: Any = None

    def poll(self) -> KVPoll:
        return self._sender.poll()

    def poll_pp_consensus(self) -> KVPoll:
        """The poll that all pipeline stages agree on. SGLang asks its first stage, before it computes the prompt."""
        return self._sender.poll() if self._stages is None else self._stages.agreed(self._sender)

    def pop_decode_prefix_len(self) -> int:
        """Tokens that decode holds already, a whole number of pages."""
        return (self._sender.decode_prefix_pages or 0) * int(self.kv_mgr.page_tokens)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._sender.init(num_kv_indices, aux_index)

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """True if a chunk is to be sent; the last one of a prompt that decode holds has no pages, but the aux row."""
        return num_pages > 0 or last_chunk

    def send(
        self,
        kv_indices: npt.NDArray[np.int32],
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        """Queues pages; the last ones, with the aux row, are known by the count of ``init``.

        ``state_indices``: with the last ones, pages of the sliding window.
        """
        event, self._early_send_wait_event = self._early_send_wait_event, None
        pages = self.kv_mgr.pages_of_pools(kv_indices, state_indices)
        self._bytes_sent += self.kv_mgr.bytes_of(pages)
        self._sender.send(pages, wait=None if event is None else event.synchronize)

    def failure_exception(self) -> None:
        """Raises the reason. Where another rank failed, SGLang gives this rank's pages up too: so does the sender."""
        failure = self._sender.failure
        self._sender.abort("another rank of this prefill engine failed")
        self._forget()
        raise transfer_error(self._sender.room, failure)

    def abort(self) -> None:
        self._sender.abort()
        self._forget()

    def clear(self) -> None:
        self._sender.close()
        self._forget()

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric(transfer_total_bytes=self._bytes_sent)

    def _forget(self) -> None:
        """SGLang has given the room up in all stages, or does so now."""
        if self._stages is not None:
            self._stages.drop(self._sender)
