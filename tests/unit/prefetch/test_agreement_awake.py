"""A rank that stood still hears what was decided meanwhile before it takes the others for absent."""

from __future__ import annotations

from typing import Any

import pytest

from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.prefetch.agreement.leader import LeaderAgreement
from kvgrpc.prefetch.agreement.member import JoinedAgreement
from kvgrpc.prefetch.protocol.votes import Stage, Vote
from kvgrpc.prefetch.threads.timers import Alarms


@pytest.mark.parametrize(("side", "tp"), [(LeaderAgreement, 0), (JoinedAgreement, 1)])
def test_the_time_of_a_vote_is_this_process_awake(side: Any, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of test_queues: an alarm that comes too late gives others a moment first."""
    asked: list[tuple[float, bool]] = []

    def note(alarms: Alarms, seconds: float, call: object, *, awake: bool = False) -> None:
        asked.append((seconds, awake))

    monkeypatch.setattr(Alarms, "after", note)
    agreement = side(RankRef(RankId("E", tp=tp), 1), Layout(tp=2))
    try:
        agreement.vote(Vote("k", Stage.HITS, 4), 0.5, lambda decision: None)
        assert asked == [(0.5, True)]
    finally:
        assert agreement.close(10.0)
