"""An engine that a request names and nobody knows is said, with those that there are."""

from __future__ import annotations

import pytest

from kvgrpc.pull.model import Holder
from kvgrpc.pull.taking.named import say_unknown

LEND = [Holder(f"p{number}", f"10.0.0.{number}:5600", f"10.0.0.{number}:5601") for number in range(1, 7)]


@pytest.mark.parametrize("names", [[], ["p1"], ["10.0.0.6:5600"], ["p2", "10.0.0.1:5600"], ["us"]])
def test_known_names_and_addresses_are_no_line(names: list[str]) -> None:
    assert say_unknown(names, LEND, "us") == ""


def test_a_line_has_the_name_those_that_there_are_and_what_to_do() -> None:
    line = say_unknown(["p1", "10.0.0.1:7777"], LEND, "us")
    assert "'10.0.0.1:7777'" in line and "'p1'" not in line
    assert "p1 at 10.0.0.1:5600, p2 at 10.0.0.2:5600, p3 at 10.0.0.3:5600, p4 at 10.0.0.4:5600 and 2 more" in line
    assert "advertised" in line


def test_where_nobody_lends_a_line_says_so() -> None:
    assert "Those that do: none." in say_unknown(["p1"], [], "us")


def test_what_a_request_says_makes_no_second_line_and_no_long_one() -> None:
    line = say_unknown([f"a\nb{number}" + 1000 * "x" for number in range(64)], LEND, "us")
    assert "\n" not in line and len(line) < 700 and "(and 63 more)" in line


def test_what_a_registry_says_makes_no_second_line_and_no_long_one() -> None:
    line = say_unknown(["p1"], [Holder(f"a\nb{n}" + 1000 * "x", f"\n{n}" + 1000 * "y", "") for n in range(9)], "us")
    assert "\n" not in line and len(line) < 1_400 and "and 5 more" in line
