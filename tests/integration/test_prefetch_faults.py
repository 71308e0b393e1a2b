"""The whole controller (cache, copies, agreement, storage) while a part of it fails under load: no lost page, no hang,
no wrong byte. Each test prints its figures (``pytest -s``)."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvgrpc.client import SyncClient
from kvgrpc.errors import FeatureDisabled
from kvgrpc.prefetch.agreement.votes import AloneAgreement, Decided, Stage, Vote
from kvgrpc.prefetch.controller.operation import Operation
from kvgrpc.prefetch.model import (
    OperationKind,
    OperationRow,
    OperationState,
    PageOutcome,
    PrefetchLimits,
    Stop,
    WritePolicy,
)
from kvgrpc.prefetch.storage import open_backend
from kvgrpc.prefetch.storage.base import timed_out
from kvgrpc.prefetch.storage.mooncake.local import LocalStore, master_command
from tests.contract.cache_serving import CacheRank, hashes_of, open_cache_rank, prompt, until
from tests.faults.storage import Fault, FaultyBackend, memory_backend
from tests.integration.agreement_rank import AGREEMENT_SECONDS, RANKS
from tests.support.tiered_engine import SECONDS, Engine

LONGEST_REQUEST = 3.0


def conversation(chance: random.Random, name: str) -> list[str]:
    """Hashes that cover what lies before them; conversations of one number begin alike."""
    text = f"{name} {chance.randint(0, 40)}-"
    words = [text + str(turn) for turn in range(chance.randint(1, 12))]
    return ["|".join(words[: end + 1]) for end in range(len(words))]


def converse(engine: Engine, chance: random.Random, name: str, requests: int) -> list[list[str]]:
    """Requests in any order, some of them prefetched, some after an eviction; each page used has its own bytes.

    No request takes as long as storage may: the engine waits for none of it."""
    asked = []
    for _ in range(requests):
        began = time.monotonic()
        hashes = conversation(chance, name)
        asked.append(hashes)
        if chance.random() < 0.4:
            engine.controller.prefetch(hashes)
        if chance.random() < 0.1:
            engine.cache.evict_device(chance.randint(1, 24))
        if chance.random() < 0.1:
            engine.cache.evict_host(chance.randint(1, 40))
        engine.request(hashes)
        assert time.monotonic() - began < LONGEST_REQUEST
    return asked


def ended(engine: Engine) -> list[Operation]:
    """All operations, once none runs, in the order of their ends."""
    assert engine.controller.book.wait_idle(SECONDS), "an operation hangs"
    return engine.controller.book.all()


def backups(engine: Engine) -> list[OperationRow]:
    return [engine.controller.book.row(each) for each in ended(engine) if each.kind is OperationKind.BACKUP]


def written_pages(engine: Engine) -> list[str]:
    """Pages that storage said it has taken."""
    return [
        page_hash
        for each in ended(engine)
        if each.kind is OperationKind.BACKUP
        for page_hash, outcome in zip(each.hashes, each.outcomes, strict=True)
        if outcome is PageOutcome.OK
    ]


def come_back(engine: Engine, asked: list[list[str]], there: set[str]) -> int:
    """Every leading page that is in storage comes back from there alone, and has its own bytes; how many."""
    back = 0
    for hashes in {tuple(each) for each in asked}:
        leading = next((n for n, each in enumerate(hashes) if each not in there), len(hashes))
        if not leading:
            continue
        engine.cache.evict_device(engine.device_pages)
        engine.cache.evict_host(engine.host_pages)
        operation = engine.controller.prefetch(hashes[:leading])
        assert operation.wait(SECONDS)
        assert (operation.state, operation.completed) == (OperationState.DONE, leading), operation.row()
        before = engine.loaded
        engine.request(list(hashes[:leading]))
        assert engine.loaded - before == leading
        back += leading
    return back


def test_a_full_disk_fails_backups_with_the_remedy_and_nothing_else(small_disk: Path) -> None:
    storage = open_backend("file", {"path": str(small_disk)})
    engine = Engine(WritePolicy.WRITE_THROUGH, storage=FaultyBackend(storage))
    chance = random.Random(12)
    asked = converse(engine, chance, "full", 150)

    rows = backups(engine)
    failed = [row for row in rows if row.state is not OperationState.DONE]
    assert failed, "the disk was not full"
    for row in failed:
        assert row.state in (OperationState.PARTIAL, OperationState.FAILED)
        assert row.failure is not None and "No space left" in row.failure.message
        assert "set max_bytes below what the disk can hold" in row.failure.message
    outcomes = Counter(outcome for row in rows for outcome in row.outcomes)
    assert set(outcomes) == {PageOutcome.OK, PageOutcome.FAILED}, "every page of every batch was tried"
    assert engine.controller.healthy

    kept = written_pages(engine)
    back = come_back(engine, asked, set(kept))

    # Room is made: backups go on without anybody's help.
    gone = set(kept[::2])
    assert storage.delete(sorted(gone), SECONDS) == len(gone)
    before = len(backups(engine))
    more = ["later"] + [f"later {number}" for number in range(7)]
    engine.request(more)
    after = backups(engine)[before:]
    assert [row.state for row in after] == [OperationState.DONE]
    assert come_back(engine, [more], set(more)) == len(more)
    engine.close()
    assert storage.close(SECONDS)
    longest = max(row.took_seconds for row in rows)
    print(
        f"\ndisk full: {len(rows)} backups, {len(failed)} of them failed or partial, pages {dict(outcomes)}, "
        f"{back} came back with their bytes, longest backup {longest:.3f} s"
    )


class Gate:
    """A backend's calls and an agreement's decisions, held until the test lets them go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def block(self) -> None:
        self.reached.set()
        assert self.opened.wait(SECONDS), "the test never opened it"

    def before(self, call: str, page: int, hashes: list[str]) -> Callable[[str, str], Fault | None]:
        """Blocks the backend's call that has this page."""

        def fault(which: str, key: str) -> Fault | None:
            if which == call and key.endswith(hashes[page]):
                self.block()
            return None

        return fault


class HeldAgreement(AloneAgreement):
    """Decides one stage only once the gate is open, as if another rank took its time."""

    def __init__(self) -> None:
        self.stage: Stage | None = None
        self.gate = Gate()
        self.threads: list[threading.Thread] = []

    def vote(self, vote: Vote, timeout: float, decided: Decided) -> None:
        decide = super().vote
        if vote.stage is not self.stage or self.gate.reached.is_set():
            decide(vote, timeout, decided)
            return

        def later() -> None:
            self.gate.block()
            decide(vote, timeout, decided)

        self.threads.append(threading.Thread(target=later))
        self.threads[-1].start()


class Cancels:
    """A rank whose operations are held at one state, cancelled there by its own scheduler or by a remote client."""

    def __init__(self, path: Path, by_client: bool) -> None:
        self.storage = FaultyBackend(memory_backend())
        self.agreement = HeldAgreement()
        self.rank: CacheRank = open_cache_rank(path, storage=self.storage, agreement=self.agreement)
        self.controller = self.rank.manager.controller
        self.by_client = by_client
        self.hashes = hashes_of(prompt(12))
        self.rank.store(self.hashes)
        self.gate = Gate()

    def hold(self, call: str, page_hash: str) -> threading.Event:
        """The page's call blocks at the gate, then times out; the backend uses the page until the event is set."""
        held = threading.Event()
        hanging = Fault(timed_out("injected: hangs", held))

        def fault(which: str, key: str) -> Fault | None:
            if which != call or not key.endswith(page_hash):
                return None
            self.gate.block()
            return hanging

        self.storage.fault = fault
        return held

    def let_go_of_pages(self, operation: Operation, held: threading.Event) -> None:
        self.gate.opened.set()
        until(lambda: operation.lingering and operation.state is OperationState.ENDING)
        assert not operation.wait(0.2), "the backend may still write there"
        counts = self.rank.manager.host.table.counts()
        assert counts["reserved"] + counts["read"] > 0
        held.set()

    def cancel(self, operation: Operation, state: OperationState, let_go: Callable[[], None] | None = None) -> None:
        """Cancels it while it is in ``state``, then lets go what held it there."""
        let_go = let_go or self.let_go
        until(lambda: operation.state is state)
        if not self.by_client:
            self.controller.terminate(operation)
            assert not operation.ended
            let_go()
            return
        with SyncClient(self.rank.address) as client:
            answers: list[bool] = []
            call = threading.Thread(
                target=lambda: answers.append(client.terminate_prefetch(operation.operation_id).quiescent)
            )
            call.start()
            until(lambda: operation.cut)
            let_go()
            call.join(SECONDS)
            assert answers == [True], "the answer comes when nothing moves any more"

    def let_go(self) -> None:
        self.gate.opened.set()
        self.agreement.gate.opened.set()

    def check(self, operation: Operation) -> None:
        """It ended once, what it kept is right, and everything else is back; then the whole prefix comes."""
        assert operation.wait(SECONDS)
        row = self.controller.book.row(operation)
        assert (row.state.name, row.stop.name) == ("CANCELLED", "CANCELLED")
        assert self.controller.book.wait_idle(SECONDS)
        counts = self.rank.manager.host.table.counts()
        assert (counts["reserved"], counts["read"], self.controller.occupied) == (0, 0, 0)
        self.storage.fault = lambda call, key: None
        if row.kind is OperationKind.PREFETCH:
            assert counts["present"] == row.completed
            self.rank.assert_bytes(self.hashes[: row.completed])
        whole = self.controller.prefetch(self.hashes)
        assert whole.wait(SECONDS) and whole.state in (OperationState.DONE, OperationState.DECLINED)
        self.rank.assert_bytes(self.hashes)
        assert self.controller.healthy
        print(f"\ncancelled: {row.kind.name} with {row.completed} of {row.asked} pages in place")

    def close(self) -> None:
        self.let_go()
        for thread in self.agreement.threads:
            thread.join(SECONDS)
        self.rank.close()
        assert self.rank.manager.controller.book.open() == []


@pytest.fixture(params=[False, True], ids=["terminate", "TerminatePrefetch"])
def cancels(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cancels]:
    cancels = Cancels(tmp_path, request.param)
    yield cancels
    cancels.close()


class TestCancelAtEveryState:
    def test_a_prefetch_that_is_queued(self, cancels: Cancels) -> None:
        other = hashes_of(prompt(4, first=7))
        cancels.storage.fault = cancels.gate.before("count", 0, other)
        before = cancels.controller.prefetch(other)
        assert cancels.gate.reached.wait(SECONDS)
        operation = cancels.controller.prefetch(cancels.hashes)
        cancels.cancel(operation, OperationState.QUEUED)
        assert before.wait(SECONDS)
        cancels.check(operation)
        assert operation.completed == 0

    def test_a_prefetch_that_asks_storage(self, cancels: Cancels) -> None:
        cancels.storage.fault = cancels.gate.before("count", 5, cancels.hashes)
        operation = cancels.controller.prefetch(cancels.hashes)
        assert cancels.gate.reached.wait(SECONDS)
        cancels.cancel(operation, OperationState.QUERYING)
        cancels.check(operation)
        assert operation.completed == 0

    @pytest.mark.parametrize("stage", [Stage.HITS, Stage.RESERVED])
    def test_a_prefetch_that_agrees(self, cancels: Cancels, stage: Stage) -> None:
        cancels.agreement.stage = stage
        operation = cancels.controller.prefetch(cancels.hashes)
        assert cancels.agreement.gate.reached.wait(SECONDS)
        if stage is Stage.RESERVED:
            assert cancels.rank.manager.host.table.counts()["reserved"] == 12
        cancels.cancel(operation, OperationState.AGREEING)
        cancels.check(operation)
        assert operation.completed == 0

    def test_a_prefetch_that_reads(self, cancels: Cancels) -> None:
        cancels.storage.fault = cancels.gate.before("read", 5, cancels.hashes)
        operation = cancels.controller.prefetch(cancels.hashes)
        assert cancels.gate.reached.wait(SECONDS)
        until(lambda: operation.completed == 4)
        cancels.cancel(operation, OperationState.TRANSFERRING)
        cancels.check(operation)
        assert operation.completed >= 8, "the batch that was on its way is kept"

    def test_a_prefetch_that_hands_over(self, cancels: Cancels) -> None:
        cancels.agreement.stage = Stage.COMPLETED
        operation = cancels.controller.prefetch(cancels.hashes)
        assert cancels.agreement.gate.reached.wait(SECONDS)
        cancels.cancel(operation, OperationState.ENDING)
        cancels.check(operation)
        assert operation.completed == 12, "all of it was there"

    def test_a_prefetch_whose_pages_the_backend_still_holds(self, cancels: Cancels) -> None:
        held = cancels.hold("read", cancels.hashes[6])
        operation = cancels.controller.prefetch(cancels.hashes)
        assert cancels.gate.reached.wait(SECONDS)
        until(lambda: operation.completed == 4)
        cancels.cancel(operation, OperationState.TRANSFERRING, lambda: cancels.let_go_of_pages(operation, held))
        cancels.check(operation)
        assert operation.completed == 6, "what comes behind a page that did not is of no use"

    def test_a_backup_that_is_queued(self, cancels: Cancels) -> None:
        first, second = hashes_of(prompt(4, first=8)), hashes_of(prompt(8, first=9))
        cancels.rank.fill(first)
        cancels.rank.fill(second)
        cancels.storage.fault = cancels.gate.before("write", 0, first)
        before = cancels.rank.manager.start_backup(first)
        assert cancels.gate.reached.wait(SECONDS)
        operation = cancels.rank.manager.start_backup(second)
        cancels.cancel(operation, OperationState.QUEUED)
        assert before.wait(SECONDS) and before.state is OperationState.DONE
        cancels.check(operation)
        assert cancels.controller.count_in_storage(second, SECONDS) == 0

    def test_a_backup_that_writes(self, cancels: Cancels) -> None:
        names = hashes_of(prompt(12, first=9))
        cancels.rank.fill(names)
        cancels.storage.fault = cancels.gate.before("write", 5, names)
        operation = cancels.rank.manager.start_backup(names)
        assert cancels.gate.reached.wait(SECONDS)
        cancels.cancel(operation, OperationState.TRANSFERRING)
        cancels.check(operation)
        assert operation.completed == 8
        cancels.rank.evict()
        back = cancels.controller.prefetch(names)
        assert back.wait(SECONDS) and back.completed == 8
        cancels.rank.assert_bytes(names[:8])

    def test_a_backup_whose_pages_the_backend_still_holds(self, cancels: Cancels) -> None:
        names = hashes_of(prompt(4, first=9))
        cancels.rank.fill(names)
        held = cancels.hold("write", names[2])
        operation = cancels.rank.manager.start_backup(names)
        assert cancels.gate.reached.wait(SECONDS)
        cancels.cancel(operation, OperationState.TRANSFERRING, lambda: cancels.let_go_of_pages(operation, held))
        cancels.check(operation)
        assert operation.completed == 3


class RankProcess:
    """A rank of a replica that can be killed, stopped and started again under its own address."""

    def __init__(self, tp: int, folder: Path, leader: str) -> None:
        self.tp = tp
        self._folder = folder
        self._leader = leader
        self.address = ""
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.integration.agreement_rank", str(self.tp), str(self._folder)]
        self.process = subprocess.Popen(
            [*command, self.address or "127.0.0.1:0", self._leader],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": "."},
        )
        self.began = time.monotonic()

    def started(self) -> str:
        self.address = str(self.answer()["address"])
        return self.address

    def tell(self, do: str, **order: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"rank {self.tp} ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **order: object) -> dict[str, Any]:
        self.tell(do, **order)
        return self.answer()

    def in_state(self, name: str, *states: str) -> None:
        until(lambda: self.ask("state", name=name)["state"] in states)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                # What was told and never read is lost with the process.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Replica:
    """Three processes. Rank 0 leads; rank 2 is the one that suffers."""

    def __init__(self, folder: Path) -> None:
        self.leader = RankProcess(0, folder, "")
        address = self.leader.started()
        self.ranks = [self.leader, *(RankProcess(tp, folder, address) for tp in range(1, RANKS))]
        for rank in self.ranks[1:]:
            rank.started()
        self.all_there()

    def all_there(self) -> None:
        until(lambda: all(rank.ask("info")["live"] == RANKS for rank in self.ranks))

    def store(self, first: int, pages: int) -> None:
        for rank in self.ranks:
            assert rank.ask("store", first=first, pages=pages) == {"state": "DONE"}

    def ends(self, name: str, ranks: list[RankProcess]) -> list[tuple[str, str, int]]:
        """How it ended at these ranks, each of them within the time of an agreement and some; nothing is left."""
        for rank in ranks:
            rank.in_state(name, "AGREEING", "TRANSFERRING", "ENDING", "DONE", "DECLINED", "FAILED", "PARTIAL")
            rank.tell("wait", name=name)
        answers = [rank.answer() for rank in ranks]
        for rank, answer in zip(ranks, answers, strict=True):
            assert answer["waited"] < AGREEMENT_SECONDS + 8.0, f"rank {rank.tp} hung: {answer}"
            info = rank.ask("info")
            assert (info["open"], info["reserved"], info["occupied"], info["healthy"]) == (0, 0, 0, True)
        waited = ", ".join(f"rank {rank.tp} {each['waited']:.2f} s" for rank, each in zip(ranks, answers, strict=True))
        print(f"\n{answers[0]['state']} {answers[0]['stop']} with {answers[0]['completed']} pages after {waited}")
        return [(each["state"], each["stop"], each["completed"]) for each in answers]

    def works(self, first: int, pages: int) -> None:
        """The next operation brings all of it, with the right bytes, at every rank."""
        self.all_there()
        name = self.leader.ask("start", first=first, pages=pages)["name"]
        assert self.ends(name, self.ranks) == [("DONE", "NONE", pages)] * RANKS

    def close(self) -> None:
        for rank in self.ranks:
            rank.process.send_signal(signal.SIGCONT)
            rank.kill()


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    replica = Replica(tmp_path_factory.mktemp("replica"))
    replica.store(1, 8)
    yield replica
    replica.close()


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
        until(lambda: leader.ask("info")["ballots"] > before)
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

    @pytest.mark.slow
    def test_a_leader_that_hangs_is_waited_for_no_longer_than_agreed(self, replica: Replica) -> None:
        leader, *others = replica.ranks
        leader.ask("slow", call="read", seconds=2.0)
        name = leader.ask("start", first=1, pages=8)["name"]
        for rank in others:
            rank.in_state(name, "TRANSFERRING", "ENDING")
        leader.process.send_signal(signal.SIGSTOP)
        assert replica.ends(name, others) == [("FAILED", "RANK_ABSENT", 0)] * 2
        leader.process.send_signal(signal.SIGCONT)
        (there,) = replica.ends(name, [leader])
        print(f"\nthe leader that hung says {there}")
        leader.ask("slow", call="read", seconds=0.0)
        replica.works(1, 8)

    def test_a_leader_that_is_killed_is_waited_for_no_longer_and_found_again(self, replica: Replica) -> None:
        leader, *others = replica.ranks
        leader.ask("slow", call="read", seconds=4.0)
        name = leader.ask("start", first=1, pages=8)["name"]
        for rank in others:
            rank.in_state(name, "TRANSFERRING", "ENDING")
        leader.kill()
        assert replica.ends(name, others) == [("FAILED", "RANK_ABSENT", 0)] * 2
        leader.start()
        leader.started()
        replica.works(1, 8)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("part", ["master", "owner"])
def test_a_store_whose_part_is_killed_under_load_ends_every_operation_and_is_used_again(part: str) -> None:
    try:
        master_command()
    except FeatureDisabled as error:
        pytest.skip(error.message)
    limits = PrefetchLimits(threshold_tokens=4, batch_pages=4, storage_timeout=2.0, operation_timeout=10.0)
    chance = random.Random(7)
    with LocalStore(owners=1, client_ttl=3) as store:
        storage = open_backend("mooncake", {"master": store.address, "lost_seconds": 5})
        engine = Engine(WritePolicy.WRITE_THROUGH, storage=FaultyBackend(storage), limits=limits)
        asked = converse(engine, chance, "before", 40)
        assert {row.state for row in backups(engine)} == {OperationState.DONE}
        back = come_back(engine, asked[:5], set(written_pages(engine)))

        before = len(engine.controller.book.all())
        began = time.monotonic()
        engine.cache.evict_device(engine.device_pages)
        engine.cache.evict_host(engine.host_pages)
        for hashes in asked:
            engine.controller.prefetch(hashes)
        if part == "master":
            store.kill_master()
        else:
            store.owners[0].kill()
        for name in ("before", "during"):
            converse(engine, chance, name, 45)
        requests = time.monotonic() - began
        during = [engine.controller.book.row(each) for each in ended(engine)[before:]]
        idle = time.monotonic() - began
        for row in during:
            assert row.took_seconds < limits.operation_timeout + 2 * limits.storage_timeout + 5.0, row
            if row.kind is OperationKind.BACKUP and row.state is not OperationState.DONE:
                assert row.failure is not None or row.stop is Stop.DEADLINE, row
            if row.state is OperationState.FAILED:
                assert row.failure is not None and "mooncake" in row.failure.message.lower(), row
        assert any(row.state in (OperationState.FAILED, OperationState.EXPIRED) for row in during), "nothing failed"
        assert engine.controller.healthy

        if part == "master":
            store.start_master()
        else:
            store.add_owner()
        began, number = time.monotonic(), 0

        def used_again() -> bool:
            nonlocal number
            number += 1
            names = [f"after {number} {page}" for page in range(6)]
            seen = len(backups(engine))
            engine.request(names)
            if [row.state for row in backups(engine)[seen:]] != [OperationState.DONE]:
                return False
            return come_back(engine, [names], set(names)) == len(names)

        until(used_again, 90.0)
        healed = time.monotonic() - began
        engine.close()
        assert storage.close(SECONDS)
    ends = Counter((row.kind.name, row.state.name, row.stop.name) for row in during)
    print(
        f"\n{part} killed: {back} pages came back before; 90 requests in {requests:.2f} s, all operations ended after "
        f"{idle:.2f} s, the longest after {max(row.took_seconds for row in during):.2f} s; {dict(ends)}; "
        f"used again {healed:.2f} s after its restart"
    )


def open_and_close(folder: Path, cycle: int) -> None:
    """Everything that an engine opens, used and closed again; every third one with work on its way."""
    storage = open_backend("file", {"path": str(folder)})
    engine = Engine(WritePolicy.WRITE_THROUGH, storage=FaultyBackend(storage))
    names = [f"conversation {cycle % 50} {number}" for number in range(6)]
    engine.request(names)
    if cycle % 3:
        assert engine.controller.book.wait_idle(SECONDS)
        engine.cache.evict_device(engine.device_pages)
        engine.cache.evict_host(engine.host_pages)
    engine.controller.prefetch(names, timeout=3600.0)
    if cycle % 2:
        assert engine.controller.reset(SECONDS)
    engine.request(names)
    host = engine.copies.host
    engine.close()
    assert host.close() and storage.close(SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_thousand_cycles_leave_threads_descriptors_and_memory_flat(tmp_path: Path) -> None:
    me, figures = psutil.Process(), []
    for cycle in range(1000):
        open_and_close(tmp_path / "pages", cycle)
        if cycle in (199, 599, 999):
            gc.collect()
            figures.append((threading.active_count(), me.num_fds(), me.memory_info().rss >> 10))
    print(f"\n(threads, descriptors, KiB) after 200, 600 and 1,000 cycles: {figures}")
    first, last = figures[0], figures[-1]
    assert last[0] <= first[0] and last[1] <= first[1]
    assert last[2] - first[2] < 8 << 10, "800 cycles leave less than 10 KiB each"
