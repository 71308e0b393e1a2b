"""Prefetches and backups of a whole replica in a hostile world: whatever fails, no page has two owners, no wrong byte
is used, every operation ends with its reason, and all ranks take the same pages. A rule that is off is noticed.

``python -m tests.simulation.prefetch 1000`` runs more of it; a failure prints the seed that replays it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kvgrpc.prefetch.model import OperationKind, OperationState, Stop
from kvgrpc.prefetch.protocol.operation import Operation
from tests.simulation.prefetch.switches import RULES
from tests.simulation.prefetch.world import World, run_seed

SEEDS = 150
DOCS = Path(__file__).parents[3] / "docs" / "prefetch" / "cases.md"


def broken(seed: int) -> list[str]:
    return [f"seed {seed}: {each}" for each in run_seed(seed).violations]


def test_whatever_fails_nothing_is_done_that_must_never_be() -> None:
    assert [each for seed in range(SEEDS) for each in broken(seed)] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nor_in_thousands_of_worlds() -> None:
    assert [each for seed in range(SEEDS, 3_000) for each in broken(seed)] == []


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_does_not_hold_is_noticed(rule: str) -> None:
    assert any(run_seed(seed, off=[rule]).violations for seed in range(SEEDS)), "no seed needs it"


def test_the_table_of_cases_names_every_rule() -> None:
    text = " ".join(DOCS.read_text().split())
    assert [rule for rule in RULES if f"*{rule}*" not in text] == []


def test_every_way_an_operation_ends_is_met() -> None:
    """Else the worlds above would show little."""
    ends: Counter[tuple[OperationKind, OperationState]] = Counter()
    reasons: Counter[tuple[OperationKind, Stop]] = Counter()
    for world in map(run_seed, range(SEEDS)):
        for operation in operations(world):
            ends[operation.kind, operation.state] += 1
            reasons[operation.kind, operation.stop] += 1
    last = [state for state in OperationState if state.ended]
    for kind in OperationKind:
        missing = [state.name for state in last if ends[kind, state] < 3]
        assert not missing, (kind.name, missing, ends)
    prefetch = {Stop(number) for number in range(2, 12)} - {Stop.CAPACITY}  # the share runs out before the pool does
    assert all(reasons[OperationKind.PREFETCH, stop] for stop in prefetch), reasons
    assert reasons[OperationKind.BACKUP, Stop.NOT_PRESENT] and reasons[OperationKind.BACKUP, Stop.PAGE_LOST]


def operations(world: World) -> list[Operation]:
    return [each for rank in world.ranks for each in rank.shell.book.all()]
