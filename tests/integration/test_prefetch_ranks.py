"""Ranks of one replica in real processes, killed and stopped: nobody hangs, and all end alike. Each test prints what it
saw (``pytest -s``)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.agreement_rank import AGREEMENT_SECONDS, DOUBT_SECONDS, RANKS
from tests.support.replica import Replica
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    replica = Replica(tmp_path_factory.mktemp("replica"))
    replica.store(1, 8)
    yield replica
    replica.close()


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """All of its ranks hold the same pages."""
    replica = Replica(tmp_path_factory.mktemp("replicated"), "mla")
    yield replica
    replica.close()


@pytest.mark.timeout(180)
class TestRanksThatFail:
    def test_a_rank_that_is_killed_while_it_reads_ends_it_at_once_for_all(self, replica: Replica) -> None:
        leader, other, victim = replica.ranks
        victim.ask("slow", call="read", seconds=4.0)
        name = leader.ask("start", first=1, pages=8)["name"]
        victim.in_state(name, "TRANSFERRING")
        victim.kill()
        assert replica.ends(name, [leader, other]) == [("FAILED", "RANK_ABSENT", 0)] * 2
        name = leader.ask("start", first=1, pages=8)["name"]
        assert replica.ends(name, [leader]) == [("DECLINED", "RANK_ABSENT", 0)], "known to be gone"
        victim.start()
        victim.started()
        replica.works(1, 8)

    def test_a_rank_that_hangs_is_waited_for_no_longer_than_agreed(self, replica: Replica) -> None:
        leader, other, victim = replica.ranks
        victim.process.send_signal(signal.SIGSTOP)
        # The other one's scheduler comes to it first, and the leader has to keep to its own time all the same.
        before = leader.ask("info")["ballots"]
        other.ask("prefetch", name="hangs", first=1, pages=8)
        wait_until(lambda: leader.ask("info")["ballots"] > before)
        leader.ask("prefetch", name="hangs", first=1, pages=8)
        assert replica.ends("hangs", [leader, other]) == [("DECLINED", "RANK_ABSENT", 0)] * 2
        victim.process.send_signal(signal.SIGCONT)
        victim.ask("prefetch", name="hangs", first=1, pages=8)
        assert replica.ends("hangs", [victim]) == [("DECLINED", "RANK_ABSENT", 0)], "as was decided"
        replica.works(1, 8)

    @pytest.mark.slow
    def test_a_rank_that_hangs_while_it_reads_leaves_the_same_pages_everywhere(self, replica: Replica) -> None:
        leader, other, victim = replica.ranks
        victim.ask("slow", call="read", seconds=2.0)
        name = leader.ask("start", first=1, pages=8)["name"]
        victim.in_state(name, "TRANSFERRING")
        victim.process.send_signal(signal.SIGSTOP)
        assert replica.ends(name, [leader, other]) == [("FAILED", "RANK_ABSENT", 0)] * 2
        victim.process.send_signal(signal.SIGCONT)
        assert replica.ends(name, [victim]) == [("FAILED", "RANK_ABSENT", 0)]
        victim.ask("slow", call="read", seconds=0.0)
        replica.works(1, 8)

    def test_a_leader_that_is_killed_is_found_again_and_answers_what_its_former_self_was_asked(
        self, replica: Replica
    ) -> None:
        leader, *others = replica.ranks
        name = self.in_doubt(replica)
        leader.kill()
        leader.start()
        leader.started()
        assert replica.ends(name, others) == [("FAILED", "RANK_ABSENT", 0)] * 2
        replica.works(1, 8)

    @pytest.mark.slow
    def test_one_that_stays_away_is_waited_for_no_longer_than_the_doubt(self, replica: Replica) -> None:
        leader, *others = replica.ranks
        name = self.in_doubt(replica)
        leader.kill()
        assert replica.ends(name, others, DOUBT_SECONDS) == [("FAILED", "RANK_ABSENT", 0)] * 2
        leader.start()
        leader.started()
        replica.works(1, 8)

    @pytest.mark.parametrize("who", [0, 2], ids=["the leader", "another rank"])
    def test_a_rank_that_stops_between_its_last_vote_and_the_decision_ends_as_all_others(
        self, replica: Replica, who: int
    ) -> None:
        """The time of a vote is over when it goes on."""
        leader, victim = replica.ranks[0], replica.ranks[who]
        name = self.in_doubt(replica)
        victim.process.send_signal(signal.SIGSTOP)
        if victim is not leader:
            leader.ask("let_go")
        time.sleep(AGREEMENT_SECONDS + 1.0)  # the outage
        victim.process.send_signal(signal.SIGCONT)
        if victim is leader:
            leader.ask("let_go")
        ends = set(replica.ends(name, replica.ranks, DOUBT_SECONDS))
        assert ends == {("DONE", "NONE", 8)} or ends == {("FAILED", "RANK_ABSENT", 0)}, ends
        replica.works(1, 8)

    @pytest.mark.slow
    def test_a_leader_that_stops_for_longer_than_the_doubt_ends_as_those_that_gave_up(self, replica: Replica) -> None:
        leader, *others = replica.ranks
        name = self.in_doubt(replica)
        leader.process.send_signal(signal.SIGSTOP)
        assert replica.ends(name, others, DOUBT_SECONDS) == [("FAILED", "RANK_ABSENT", 0)] * 2
        leader.process.send_signal(signal.SIGCONT)
        leader.ask("let_go")
        ((state, _, pages),) = replica.ends(name, [leader])
        assert state != "DONE" and pages == 0
        replica.works(1, 8)

    def in_doubt(self, replica: Replica) -> str:
        """A prefetch whose leader still reads, and has heard of all others how many pages they have."""
        leader = replica.ranks[0]
        leader.ask("hold", call="read")
        name = str(leader.ask("start", first=1, pages=8)["name"])
        wait_until(lambda: leader.ask("last_votes", name=name)["votes"] == RANKS - 1)
        return name


@pytest.mark.timeout(180)
class TestPagesThatAllRanksHold:
    """MLA: each page has one writer, and the others see to it that it is written."""

    def test_the_pages_of_a_writer_that_is_killed_are_written_by_those_that_live(self, replicated: Replica) -> None:
        ranks = replicated.ranks
        *living, victim = ranks
        leader, _ = living
        victim.ask("hold", call="write")
        own = [rank.ask("write", first=1, pages=30)["name"] for rank in ranks]  # as a write policy begins it
        for rank in ranks:
            rank.ask("fill", first=2, pages=12)
        ordered = leader.ask("back_up", first=2, pages=12)["name"]  # as a remote client
        leader.in_state(ordered, "TRANSFERRING", "ENDING")
        victim.kill()
        told = []
        for rank, name in zip(living, own[:2], strict=True):
            assert rank.ask("wait", name=name)["state"] == "DONE"
            told.append(rank.ask("outcomes", name=name))
        assert sum(each["OK"] for each in told) >= 30
        assert all(each["OK"] + each.get("SKIPPED", 0) == 30 for each in told)
        assert {end[:2] for end in replicated.ends(ordered, living)} == {("FAILED", "RANK_ABSENT")}
        for rank in living:
            assert rank.ask("stored", first=1, pages=30)["pages"] == 30
            assert rank.ask("stored", first=2, pages=12)["pages"] == 12, "they wrote what the third had to write"
