"""The leader's table of votes: who is lost and comes back, and what it remembers."""

from __future__ import annotations

from kvgrpc.prefetch.model import Stop
from kvgrpc.prefetch.protocol.votes import AgreementCore, Decision, Stage, Vote


def vote(key: str) -> Vote:
    return Vote(key, Stage.HITS, 7)


def absent(key: str) -> Decision:
    return Decision(key, Stage.HITS, 0, Stop.RANK_ABSENT)


def test_nobody_waits_for_a_rank_that_is_lost_until_it_is_back() -> None:
    core = AgreementCore("ab")
    assert core.live == {"a", "b"}
    assert core.vote("a", vote("before"), 0.0, 1.0) == []
    assert core.lose("b") == [absent("before")]
    assert core.live == {"a"}
    assert core.vote("a", vote("meanwhile"), 0.0, 1.0) == [absent("meanwhile")]
    assert core.join("b")
    assert core.vote("a", vote("after"), 0.0, 1.0) == [] and core.open_ballots == 1


def test_each_loss_and_each_return_begins_one_epoch() -> None:
    core = AgreementCore("ab")
    first = core.epoch
    epochs = []
    for change in (core.lose, core.lose, core.join, core.join):
        assert change("b") in ([], True)
        epochs.append(core.epoch - first)
    assert epochs == [1, 1, 2, 2]


def test_who_is_no_member_is_neither_lost_nor_joins() -> None:
    core = AgreementCore("ab")
    first = core.epoch
    core.vote("a", vote("op"), 0.0, 1.0)
    assert core.lose("stranger") == [] and not core.join("stranger")
    assert core.live == {"a", "b"} and core.epoch == first and core.open_ballots == 1


def test_the_last_decisions_are_remembered_for_those_who_come_late() -> None:
    core = AgreementCore("ab", remembered=2)
    for key in ("first", "second", "third"):
        core.vote("a", vote(key), 0.0, 1.0)
    assert core.expire(1.0) == [absent("first"), absent("second"), absent("third")]
    assert core.vote("b", vote("first"), 1.0, 1.0) == [], "it begins anew"
    for key in ("second", "third"):
        assert core.vote("b", vote(key), 1.0, 1.0) == [absent(key)]
