"""What tests/mutants/known.txt excuses exists: the reason of a fault that is gone would excuse another like it."""

from __future__ import annotations

from tests.mutants.__main__ import key_of, known_survivors
from tests.mutants.faults import mutants_of
from tests.mutants.targets import TARGETS, files_of


def test_each_fault_that_is_known_to_survive_can_still_be_made() -> None:
    files = {path for target in TARGETS for path in files_of(target)}
    possible = {key_of(mutant) for path in files for mutant in mutants_of(path)}
    assert len(possible) > 3000
    assert sorted(known_survivors() - possible) == []
