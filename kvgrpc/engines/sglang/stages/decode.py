"""The pipeline stages of a decode engine, which end a hand-off together. Imports nothing of SGLang.

SGLang's stages tell each other in a ring of which requests the hand-off is over, and the first stage passes on those
alone that went well with it: the others keep what failed, and what failed in one alone goes on in the rest. Each
stage gives the pages of a failed one back by itself, and can then admit what another has no room for. So the ring
carries five things here: what every stage has, what any has lost and why, of the requests whose pages are held those
that one may free and those that one may not, and what ended before a later stage admitted it. All end the same
requests, and free the same pages, in the same step; a stage that has no reason of its own says that of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvgrpc.errors import Failure
from kvgrpc.transfer import KVPoll


def over(is_ours: Callable[[], bool]) -> Callable[..., Any]:
    """A hook around ``_pp_pd_get_decode_transferred_ids``: what the stages so far have, lost, may free, and hold."""

    def agreed(original: Callable[[Any], Any], scheduler: Any) -> Any:
        if not is_ours():
            return original(scheduler)
        before = None if scheduler.pp_group.is_first_rank else scheduler._pp_recv_pyobj_from_prev_stage()
        transfers = scheduler.disagg_decode_transfer_queue
        done, failed = scheduler.get_rids(transfers.queue, False, [KVPoll.Success], [KVPoll.Failed])
        lost = _reasons(transfers, failed)
        moving = {waiting.req.bootstrap_room for waiting in transfers.queue}
        held = [_held(entry, moving) for entry in transfers._deferred_releases]
        free, busy = scheduler.get_rids(held, False, [KVPoll.Success], [KVPoll.Transferring])
        never: list[str] = []
        if before is not None:
            had, gone = set(before[0]), {*before[0], *before[1]} - _rids(transfers)
            done = [rid for rid in done if rid in had]
            # One that is still to be admitted here never will be: the stage before has done so.
            never = list({*before[4], *(gone and gone & _rids(scheduler.disagg_decode_prealloc_queue))})
            lost = {rid: before[1].get(rid) or lost.get(rid) for rid in {*lost, *before[1], *never}}
            free, busy = [*free, *before[2]], [*busy, *before[3]]
        return [done, lost, free, busy, never]

    return agreed


def ending(is_ours: Callable[[], bool]) -> Callable[..., Any]:
    """A hook around ``process_decode_transfer_queue``: what any stage has lost ends here too, and in the next one."""

    def end(original: Callable[[Any, Any], Any], scheduler: Any, agreed: Any) -> Any:
        if agreed is None or not is_ours():
            return original(scheduler, agreed)
        done, lost, free, busy, never = agreed
        transfers = scheduler.disagg_decode_transfer_queue
        for waiting in transfers.queue:
            if waiting.req.rid in lost:
                _give_up(waiting.kv_receiver, lost[waiting.req.rid])
        admits = scheduler.disagg_decode_prealloc_queue
        if never and (waits := set(never) & _rids(admits)):
            admits.pop_preallocated(pp_good_rids=[], pp_bad_rids=list(waits))
        # A round that is under way names what the one before it took.
        here = _rids(transfers)
        freed, held = set(free) - set(busy), transfers._deferred_releases
        transfers._deferred_releases = [entry for entry in held if entry[0].req.rid in freed]
        taken = original(scheduler, [*done, *lost])
        transfers._deferred_releases[:0] = [entry for entry in held if entry[0].req.rid not in freed]
        left = {*taken, *_rids(transfers)}
        return [taken, {**{rid: None for rid in done if rid in here - left}, **lost}, free, busy, never]

    return end


def _rids(queue: Any) -> set[str]:
    return {each.req.rid for each in queue.queue}


def _reasons(queue: Any, failed: list[str]) -> dict[str, Failure | None]:
    """None: another rank of this stage has the reason."""
    if not failed:
        return {}
    receivers = {each.req.rid: each.kv_receiver for each in queue.queue}
    return {rid: getattr(receivers[rid], "failure", None) for rid in failed}


def _give_up(receiver: Any, why: Failure | None) -> None:
    if hasattr(receiver, "give_up"):
        receiver.give_up(why)
    else:  # SGLang's own, of health requests, which fail by abort at any time
        receiver.abort()


def _held(entry: tuple[Any, ...], moving: set[int]) -> Any:
    """A failed request whose pages SGLang holds, as the ranks of a stage ask each other of those that wait.

    SGLang asks by room, so another sample of it in ``moving`` may be held, and asked for too, before these are free.
    """
    request, *_, deadline, _, acks = entry  # 0.5.21 has no time of its begin

    def poll() -> KVPoll:
        room = request.req.bootstrap_room
        safe = room not in moving and request.kv_receiver.kv_mgr.is_abort_release_safe(room, acks)
        return KVPoll.Success if safe or time.monotonic() >= deadline else KVPoll.Transferring

    return SimpleNamespace(req=request.req, kv_receiver=SimpleNamespace(poll=poll))
