"""Checks of a pair whose engines have pipeline stages."""

from __future__ import annotations

import re

from tests.engines.engine import Engine, Pair
from tests.engines.model import Case, Reference
from tests.engines.stages import Asked, has_met, wait_for
from tests.support.waiting import wait_until

LENGTHS = (1, 3, 100, 300)
PEER_LOST_SECONDS = 20.0  # 1 s by the session; the rest is two cores, which the dying engine keeps busy


def check(pair: Pair, case: Case) -> None:
    """Tokens are those of transformers, which needs every layer of each stage: decode is told another prompt."""
    prefill, decode = pair.submit_unseen(case.prompt, len(case.tokens))
    assert decode.result() == case.tokens
    prefill.result()


def check_at_once(pair: Pair, reference: Reference) -> None:
    """Several requests at once, of which each side gives one up; no page stays behind."""
    cases = [reference.case(120) for _ in range(6)]
    requests = [pair.submit_unseen(case.prompt, 8) for case in cases]
    pair.prefill.abort(requests[1][0])
    pair.decode.abort(requests[4][1])
    for case, (prefill, decode) in zip(cases, requests, strict=True):
        assert prefill.wait() and decode.wait(), pair.prefill.log_tail() + pair.decode.log_tail()
        assert decode.error is not None or decode.tokens == case.tokens
    assert sum(decode.error is None for _, decode in requests) >= 4
    check(pair, reference.case(50))
    assert pair.prefill.is_empty() and pair.decode.is_empty(), pair.decode.log_tail()


def kill_last_stage(pair: Pair, reference: Reference, role: str, *, shortens: bool = False) -> None:
    """A request that waits for all stages of the other side ends, with the reason at decode, and the engine of that
    role that starts again is used. ``shortens``: prefill leaves the prompt's last token to decode, so that its own
    token is not the prompt's next one."""
    asked = Asked(pair, reference.case(100), pair.room())
    decode = asked.ask_decode()
    wait_for(pair.decode, asked.number, has_met)
    if role == "prefill":
        pair.prefill.kill_stage(1)
        assert decode.wait(PEER_LOST_SECONDS), pair.decode.log_tail()
        # The stages that are left are ended in order by their engine; which of them decode hears of first varies.
        reason = pair.reason_of(decode, asked.room)
        assert "PEER_LOST" in reason or "SERVER_DRAINING" in reason, pair.decode.log_tail()
    else:
        pair.decode.kill_stage(1)
        assert asked.ask_prefill().wait(PEER_LOST_SECONDS), pair.prefill.log_tail()
    pair.restart(role)
    if shortens:
        check(pair, reference.case(100))
    else:
        pair.check(reference)
    assert pair.prefill.is_empty() and pair.decode.is_empty(), pair.prefill.log_tail() + pair.decode.log_tail()


def check_empty(engine: Engine, stages: int) -> None:
    """In each stage: the first answers for all, and any that still has a request says instead that it flushes
    nothing."""
    told = len(engine.log())

    def emptied() -> bool:
        assert engine.is_empty(), engine.log_tail()
        lines = engine.log()[told:]
        return stages == 1 or all(re.search(rf"PP{stage}\b.*Cache flushed", lines) for stage in range(stages))

    wait_until(emptied)
