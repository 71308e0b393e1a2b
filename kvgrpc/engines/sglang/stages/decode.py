"""The pipeline stages of a decode engine, which end a hand-off together. Imports nothing of SGLang.

SGLang's stages tell each other in a ring of which requests the hand-off is over, and the first stage passes on those
alone that went well with it: the others keep what failed, and what failed in one of them alone goes on in the rest. So
the ring carries two lists here: what every stage has, and what any of them has lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvgrpc.transfer import KVPoll


def over(is_ours: Callable[[], bool]) -> Callable[..., Any]:
    """A hook around ``_pp_pd_get_decode_transferred_ids``: what the stages so far have, and have lost."""

    def agreed(original: Callable[[Any], Any], scheduler: Any) -> Any:
        if not is_ours():
            return original(scheduler)
        before = None if scheduler.pp_group.is_first_rank else scheduler._pp_recv_pyobj_from_prev_stage()
        queue = scheduler.disagg_decode_transfer_queue.queue
        done, lost = scheduler.get_rids(queue, False, [KVPoll.Success], [KVPoll.Failed])
        if before is not None:
            had = set(before[0])
            done, lost = [rid for rid in done if rid in had], list({*lost, *before[1]})
        return [done, lost]

    return agreed


def ending(is_ours: Callable[[], bool]) -> Callable[..., Any]:
    """A hook around ``process_decode_transfer_queue``: what any stage has lost ends here too, and in the next one."""

    def end(original: Callable[[Any, Any], Any], scheduler: Any, agreed: Any) -> Any:
        if agreed is None or not is_ours():
            return original(scheduler, agreed)
        done, lost = agreed
        transfers, ended = scheduler.disagg_decode_transfer_queue, set(lost)
        for waiting in transfers.queue:
            if waiting.req.rid in ended:
                # SGLang's own receivers of health requests fail by abort, at any time.
                getattr(waiting.kv_receiver, "give_up", waiting.kv_receiver.abort)()
        # A round that is under way names what the one before it took.
        here = {waiting.req.rid for waiting in transfers.queue}
        taken = original(scheduler, [*done, *lost])
        left = {*taken, *(waiting.req.rid for waiting in transfers.queue)}
        return [taken, [*lost, *(rid for rid in done if rid in here - left)]]

    return end
