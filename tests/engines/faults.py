"""Kills and stops of one side while requests are at every stage of their hand-off: what the other side must do.

Both engines are asked the same; test_sglang_faults.py and test_vllm_faults.py run it.
"""

from __future__ import annotations

import time

from kvgrpc.client import SyncClient
from tests.engines.engine import Engine, Pair, Request
from tests.engines.model import Reference
from tests.engines.stages import LONG, Asked, Stages, is_over, rank_address, room_of, stop_at_every_stage
from tests.support.waiting import wait_until

# docs/session.md rule 3, break and loss: a peer that is gone is noticed in 1 s, a stopped one after 4 s;
# prefill waits 1 s for decode to come back first. The rest is a scheduler step, and two cores.
GONE_SECONDS, STOPPED_SECONDS = 2.5, 6.5
# A break after a second of silence counts as that of a stopped peer; its last word came up to a heartbeat earlier.
SILENT_SECONDS = 0.7
# Rule 8, pages by evidence: those whose writer is dead come back after the settle time, 2 s from the proof.
BACK_TO_THE_POOL_SECONDS = GONE_SECONDS + 2.0
# A side that went on first has to hear what it missed.
BACK_SECONDS = 15.0


def kill_at_every_stage(pair: Pair, reference: Reference, role: str) -> None:
    """The other side ends what it can no longer serve, and serves on with the next engine of that role."""
    survivor = _other(pair, role)
    pair.check(reference)
    now = stop_at_every_stage(pair, reference, role)
    stopped, now.moment = now.moment, getattr(pair, role).kill()
    print(f"{role}: killed {now.moment - stopped:.3f} s after it was stopped")
    silent = role == "decode" and now.moment - stopped > SILENT_SECONDS
    _ends(pair, now, role, stopped + STOPPED_SECONDS - now.moment if silent else GONE_SECONDS)
    if role == "prefill":
        wait_until(lambda: not _holds(survivor))
        held = time.monotonic() - now.moment
        print(f"no page of decode was held any more {held:.2f} s after the kill")
        assert held < BACK_TO_THE_POOL_SECONDS, survivor.log_tail()
    pair.restart(role)
    pair.check(reference)
    if role == "prefill":
        _computes_on(now.computing)
    elif pair.both_sides_at_once:
        assert now.early.prefill is not None and "PEER_LOST" in now.early.prefill.failure()
    else:
        _serves_late(now.early)
    assert survivor.alive and survivor.is_empty()


def stop_at_every_stage_and_go_on(pair: Pair, reference: Reference, role: str) -> None:
    """The same of a side that hangs; then it goes on, and is used again. What it may still write to stays held."""
    survivor = _other(pair, role)
    pair.check(reference)
    now = stop_at_every_stage(pair, reference, role)
    try:
        _ends(pair, now, role, STOPPED_SECONDS)
        if role == "prefill":
            _computes_on(now.computing)
            assert not survivor.is_empty(1), "pages were given back that a stopped prefill may still write to"
    finally:
        getattr(pair, role).go_on()
    pair.check(reference, within=BACK_SECONDS)
    if role == "decode":
        _computes_on(now.computing)
        for asked in (now.alone, now.under_way):
            assert asked.decode is not None and asked.decode.wait(), pair.decode.log_tail()
            _ended_well_or_with_our_reason(asked, asked.decode)
    _serves_late(now.early)
    assert survivor.alive and survivor.is_empty(40)


def _ends(pair: Pair, now: Stages, role: str, seconds: float) -> None:
    """What the other side has of requests at each stage ends in time, counted from the fault."""
    if role == "decode":
        now.alone.ask_prefill()  # its decode is known, and gone
    waiting = {"alone": now.alone, "under way": now.under_way}
    for asked in waiting.values():
        half = _half(asked, role)
        assert half.wait(max(0.0, now.moment + seconds - time.monotonic())), half.engine.log_tail()
        _ended_well_or_with_our_reason(asked, half)
    survivor = _other(pair, role)  # vLLM's prefill answers before its blocks are through
    wait_until(lambda: all(_is_over_at(survivor, asked) for asked in waiting.values()))
    rooms_over = time.monotonic() - now.moment
    assert rooms_over < seconds, f"after {rooms_over:.3f} s, bound {seconds}: {survivor.log_tail()}"
    if role == "prefill":
        assert "PEER_LOST" in pair.reason_of(now.alone.decode, now.alone.room)
    else:
        assert now.computing.prefill is not None and now.computing.prefill.result() == now.computing.case.tokens[:1]
    after = ", ".join(f"{name} {(_half(asked, role).ended or 0) - now.moment:.3f}" for name, asked in waiting.items())
    print(f"{role}: the other side's requests ended after (s): {after}; their rooms by {rooms_over:.3f}")


def _is_over_at(engine: Engine, asked: Asked) -> bool:
    found = room_of(engine, asked.number)
    return found is None or is_over(found)


def _holds(engine: Engine) -> bool:
    with SyncClient(rank_address(engine)) as client:
        return any(room.held for room in client.list_rooms())


def _half(asked: Asked, role: str) -> Request:
    """That of the side which is left."""
    half = asked.decode if role == "prefill" else asked.prefill
    assert half is not None
    return half


def _ended_well_or_with_our_reason(asked: Asked, half: Request) -> None:
    """Either the session or, at prefill, a write was the first to notice; or all pages were through."""
    if half.error is None:
        assert half.tokens == asked.case.tokens[: len(half.tokens)] and half.tokens
    else:
        reason = asked.pair.reason_of(half, asked.room)
        assert "PEER_LOST" in reason or "TRANSFER_FAILED" in reason, reason


def _computes_on(asked: Asked) -> None:
    assert asked.decode is not None
    computed = asked.decode.result()
    assert (computed[: len(asked.case.tokens)], len(computed)) == (asked.case.tokens, LONG)


def _serves_late(asked: Asked) -> None:
    """Prefill has waited for its decode."""
    decode = asked.ask_decode()
    assert decode.result() == asked.case.tokens
    assert asked.prefill is not None and asked.prefill.result() == asked.case.tokens[:1]


def _other(pair: Pair, role: str) -> Engine:
    return pair.decode if role == "prefill" else pair.prefill
