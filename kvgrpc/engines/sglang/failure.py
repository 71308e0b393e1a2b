"""Turns a failure of a room into the exception that SGLang reads."""

from __future__ import annotations

from sglang.srt.disaggregation.common.conn import KVTransferError

from kvgrpc.errors import Failure


def transfer_error(room: int, failure: Failure | None) -> KVTransferError:
    """The reason by its name, and whose it is; without a failure it was another rank's, which SGLang logs there."""
    if failure is None:
        text = "another rank of this engine failed; its log has the reason"
        return KVTransferError(room, text, is_from_another_rank=True)
    seen_by = f" (seen by {failure.origin})" if failure.origin else ""
    return KVTransferError(room, f"{failure.reason.name}: {failure.message}{seen_by}")
