"""Rank agreement over gloo between real processes: opposite orders, a killed rank, a stopped rank; nobody hangs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Each process loads torch.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]


class Rank:
    """One process, and what it said."""

    def __init__(self, number: int, size: int, file: Path, order: str) -> None:
        command = [sys.executable, "-m", "tests.support.gloo_rank", str(number), str(size), str(file), order]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, count: int) -> dict[str, Any]:
        """The next things it says, by name."""
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()) for _ in range(count))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    orders = ("one=5,two=3,three=9", "three=4,two=7,one=6")
    made = [Rank(number, 2, tmp_path / "store", order) for number, order in enumerate(orders)]
    yield made
    for rank in made:
        rank.process.kill()
        rank.process.communicate()


def test_opposite_orders_agree_on_the_smallest_of_each(ranks: list[Rank]) -> None:
    for rank in ranks:
        found = rank.hear(3)
        assert {name: pages for name, (pages, *_) in found.items()} == {"one": 5, "two": 3, "three": 4}
    ranks[0].tell("begin four=1")
    pages, stop, seconds = ranks[0].hear(1)["four"]
    assert (pages, stop) == (0, "RANK_ABSENT") and seconds < 20
    ranks[1].tell("begin four=8")
    assert ranks[1].hear(1)["four"][:2] == [0, "RANK_ABSENT"], "it hears what was decided without it"
    for rank in ranks:
        rank.tell("close")
    assert [rank.hear(1) for rank in ranks] == [{"closed": True}] * 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_is_gone_declines_for_the_others_within_the_time_of_the_group(ranks: list[Rank], how: int) -> None:
    for rank in ranks:
        rank.hear(3)
    ranks[1].process.send_signal(how)
    ranks[0].tell("begin four=1")
    pages, stop, seconds = ranks[0].hear(1)["four"]
    assert (pages, stop) == (0, "RANK_ABSENT") and seconds < 20
    ranks[0].tell("begin five=1")
    assert ranks[0].hear(1)["five"][1] == "RANK_ABSENT"
    ranks[0].tell("close")
    assert ranks[0].hear(1) == {"closed": True}
