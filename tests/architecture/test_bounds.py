"""docs/bounds.md says of each bound what the code does."""

from __future__ import annotations

import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvgrpc.rpc.interceptors import ALLOWED, CallLimits
from kvgrpc.rpc.methods import largest_request
from kvgrpc.rpc.options import LARGEST_REQUEST_BYTES
from kvgrpc.transfer.protocol.types import Bounds

PAGE = (Path(__file__).parents[2] / "docs" / "bounds.md").read_text()


def section(name: str) -> str:
    return PAGE.split(f"## {name}\n")[1].split("\n## ")[0]


def rows(name: str) -> list[list[str]]:
    found = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section(name).splitlines() if line[:1] == "|"
    ]
    return [row for row in found if not set(row[0]) <= {"-", ":"} and row[0] != "What"]


ROOMS = rows("Rooms, sessions and the registry")
EVENTS = rows("Events")


@pytest.mark.parametrize("row", [*ROOMS, *EVENTS], ids=lambda row: row[1].split("`")[1])
def test_a_bound_has_the_value_of_the_code_and_says_what_happens_past_it(row: list[str]) -> None:
    _, name, value, past = row
    place, _, constant = name.split("`")[1].rpartition(" ")
    if not place:
        expected = getattr(Bounds(), constant.removeprefix("bounds."))
    else:
        expected = getattr(importlib.import_module("kvgrpc." + place.removesuffix(".py").replace("/", ".")), constant)
    assert int(value.replace(",", "")) == expected
    assert past


def test_every_bound_of_a_rank_is_there() -> None:
    named = {name for row in ROOMS for name in re.findall(r"`bounds\.(\w+)`", row[1])}
    assert named == {each.name for each in fields(Bounds)}


def test_the_limits_of_one_caller_and_of_all_are_there() -> None:
    numbers = [
        int(each.replace(",", "")) for each in re.findall(r"\d[\d,]*", section("Of one caller, beside those of all"))
    ]
    for each in fields(CallLimits):
        assert getattr(CallLimits(), each.name) in numbers, each.name


def test_the_methods_that_take_more_than_64_kib_are_there_and_no_others() -> None:
    (line,) = [row[1] for row in rows("Before anybody is asked who they are") if row[0] == "one request, by method"]
    sizes = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MiB + 64 KiB": LARGEST_REQUEST_BYTES}
    said = dict[str, int]()
    for part in line.split("; ")[1:]:
        size = next(text for text in sorted(sizes, key=len, reverse=True) if part.endswith(text))
        said |= dict.fromkeys(re.findall(r"[A-Z]\w+", part.removesuffix(size)), sizes[size])
    streams = ("Session", "KeepAlive", "JoinAgreement")
    found = {path.rpartition("/")[2]: min(largest_request(path), LARGEST_REQUEST_BYTES) for path in ALLOWED}
    assert {name: size for name, size in found.items() if size > 64 << 10 and name not in streams} == said


def test_every_case_that_the_index_of_hostile_names_exists() -> None:
    folder = Path(__file__).parents[1] / "contract" / "hostile"
    lines = [line for line in (folder / "README.md").read_text().splitlines() if line.startswith("| ") and "`" in line]
    assert len(lines) > 35
    for line in lines:
        file = ""
        for name in re.findall(r"`([\w/.]+)`", line):
            if name.endswith(".py"):
                path = folder.parents[2] / name if "/" in name else folder / name
                file = path.read_text()
            else:
                assert f"def {name}(" in file, f"{path} has no {name}"
