"""SGLang's unified memory moves pages together where it runs short, but for those that may be written to.

Imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GATE = "sglang.srt.disaggregation.utils.unified_memory_disagg_move_gate"
# Of an SGLang whose unified memory can be served.
NEEDED = {
    GATE: "scheduler",
    "sglang.srt.disaggregation.decode.DecodeTransferQueue.has_pending_deferred_releases": "self",
}


def waiting_for_releases(is_ours: Callable[[], bool]) -> Callable[..., Any]:
    """A hook around SGLang's gate of moves, which looks at open transfers alone: nothing moves either while pages of
    failed requests are held back, because prefill may still write to where they are.
    """

    def gate_of(original: Callable[[Any], Callable[[], bool]], scheduler: Any) -> Callable[[], bool]:
        may_move = original(scheduler)
        if not is_ours():
            return may_move
        queue = getattr(scheduler, "disagg_decode_transfer_queue", None)  # prefill has none, and reads alone
        return may_move if queue is None else lambda: may_move() and not queue.has_pending_deferred_releases()

    return gate_of
