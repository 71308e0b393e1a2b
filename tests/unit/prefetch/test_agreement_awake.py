"""A rank that stood still hears what was decided meanwhile before it takes the others for absent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.prefetch import wire
from kvgrpc.prefetch.agreement.leader import LeaderAgreement
from kvgrpc.prefetch.agreement.member import JoinedAgreement
from kvgrpc.prefetch.model import Stop
from kvgrpc.prefetch.protocol.votes import Decision, Stage, Vote
from kvgrpc.prefetch.threads.timers import AWAKE_SECONDS, Alarms
from kvgrpc.v1 import prefetch_service_pb2 as pb
from tests.support.waiting import wait_until

LAYOUT = Layout(tp=2)
SECONDS = 0.05


@pytest.fixture
def stand_still(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The thread of alarms does, from the first one that is set on until the event, as all of the process would."""
    awake, after = threading.Event(), Alarms.after

    def stand_still() -> None:
        awake.wait(10.0)

    def stopping(alarms: Alarms, *arguments: object, **more: bool) -> object:
        after(alarms, 0.0, stand_still)
        return after(alarms, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Alarms, "after", stopping)
    yield awake
    awake.set()


def test_a_member_that_stood_still_hears_the_decision(stand_still: threading.Event) -> None:
    member, decided = JoinedAgreement(RankRef(RankId("E", tp=1), 1), LAYOUT), list[Decision]()
    try:
        member.vote(Vote("k", Stage.HITS, 4), SECONDS, decided.append)
        time.sleep(SECONDS + AWAKE_SECONDS + 0.2)  # nothing of the process runs
        stand_still.set()
        time.sleep(AWAKE_SECONDS / 5)  # the loop comes to its sockets
        message = pb.JoinAgreementResponse(decisions=[wire.decision_to_pb(Decision("k", Stage.HITS, 3))])
        member._heard(message)
        wait_until(lambda: decided)
        assert decided == [Decision("k", Stage.HITS, 3)]
    finally:
        assert member.close(10.0)


def test_a_leader_that_hears_nothing_takes_the_others_for_absent_all_the_same(stand_still: threading.Event) -> None:
    leader, decided = LeaderAgreement(RankRef(RankId("E"), 1), LAYOUT), list[Decision]()
    leader._core.join(RankId("E", tp=1))
    try:
        leader.vote(Vote("k", Stage.HITS, 4), SECONDS, decided.append)
        time.sleep(SECONDS + AWAKE_SECONDS + 0.2)  # nothing of the process runs
        stand_still.set()
        time.sleep(AWAKE_SECONDS / 5)  # the loop comes to its sockets
        assert not decided
        wait_until(lambda: decided)
        assert decided == [Decision("k", Stage.HITS, 0, Stop.RANK_ABSENT)]
    finally:
        assert leader.close(10.0)
