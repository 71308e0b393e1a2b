"""What a follower does about each failure: the table of docs/followers.md, by which all three languages are tested."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc.errors import KvGrpcError, Reason, exception_of
from kvgrpc.events.following.follower import FollowerCore
from kvgrpc.events.following.index import BlockIndex
from kvgrpc.events.following.messages import Mode, OpenWatch
from kvgrpc.events.model import BlockStored
from kvgrpc.rpc.status import error_from, trailing

ROOT = Path(__file__).parents[3]
ROWS: list[dict[str, Any]] = json.loads((ROOT / "tests/conformance/events/failures.json").read_text())
CASES = [
    pytest.param(status, row, id=f"{status}-{row.get('retry_seconds')}") for row in ROWS for status in row["statuses"]
]
HELD = 7


class Refusal(grpc.RpcError):
    """What a call raises whose server ended it so."""

    def __init__(self, code: str, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self._code, self._metadata = grpc.StatusCode[code], metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "refused"

    def trailing_metadata(self) -> Any:
        return self._metadata


def refusal(status: str, retry_after: float | None) -> KvGrpcError:
    code, reason, field, *_ = [*status.split(), "", ""]
    if not reason and retry_after is None:
        return error_from(Refusal(code, ()))
    # A time without a reason comes from servers that are not ours: of whatever reason, the code and the time count.
    known = exception_of(Reason[reason or "ENGINE_NOT_FOUND"])
    error = known("refused", metadata={"field": field}, retry_after=retry_after)
    return error_from(Refusal(code, trailing(error)[2]))


class Following:
    """A core, what it asked for, and what it shows."""

    def __init__(self) -> None:
        self.index = BlockIndex()
        self.core = FollowerCore(self.index, lambda _: [BlockStored([HELD], None, [], 16)], jitter=lambda: 0.0)
        self.core.start()
        self.asked = self.opened()

    def opened(self) -> OpenWatch:
        return [command for command in self.core.take_commands() if isinstance(command, OpenWatch)][-1]

    def knows(self) -> None:
        """A snapshot is complete, and the call that resumes behind it is on its way."""
        self.core.begun(self.asked.number, "a", 1, 1, 0.0)
        self.core.snapshot(self.asked.number, 0, 1, [b""], 0.0)
        self.core.snapshot_complete(self.asked.number, None, 0.0)
        self.core.ended(self.asked.number, None, 0.0)
        self.core.tick(1.0)
        self.asked = self.opened()
        assert (self.asked.mode, self.asked.first) == (Mode.TAIL, 1)

    def refused(self, error: KvGrpcError, row: dict[str, Any]) -> list[str]:
        """What it does about it, in the words of the table."""
        self.core.ended(self.asked.number, error, 1.0)
        words = ["keep" if self.index.score([HELD]) else "forget"]
        again_at = self.core._retry.at
        if again_at is not None:
            waits = float(row.get("waits_seconds", 0.0))
            assert waits + 0.05 <= again_at - 1.0 <= waits + 2.0
            self.core.tick(again_at)
        mode = self.opened().mode.name
        words += [f"at once {mode}"] if again_at is None else ["pause", mode]
        return [*words, "lasting"] if self.core.lasting else words


@pytest.mark.parametrize(("status", "row"), CASES)
def test_a_resumed_call_that_is_refused(status: str, row: dict[str, Any]) -> None:
    following = Following()
    following.knows()
    assert ", ".join(following.refused(refusal(status, row.get("retry_seconds")), row)) == row["cursor"]


@pytest.mark.parametrize(("status", "row"), CASES)
def test_the_first_call_that_is_refused(status: str, row: dict[str, Any]) -> None:
    following = Following()
    assert ", ".join(following.refused(refusal(status, row.get("retry_seconds")), row)[1:]) == row["first"]


def test_what_was_lasting_is_over_once_it_is_answered() -> None:
    following = Following()
    following.refused(refusal("NOT_FOUND STREAM_NOT_FOUND", None), {})
    assert following.core.lasting
    following.core.begun(following.core._opened, "a", 1, 1, 9.0)
    assert not following.core.lasting


def test_publishers_that_refuse_everything_are_asked_twice_a_pause_at_most() -> None:
    for status in ("ABORTED STALE_LOG", "UNIMPLEMENTED FEATURE_DISABLED", "OUT_OF_RANGE EVENTS_COMPACTED"):
        following, calls = Following(), 1
        error = refusal(status, None)
        while following.core._retry.at is None:
            following.core.ended(following.core._opened, error, 1.0)
            calls += 1
            assert calls < 5, status


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/followers.md").read_text()
    rows = re.findall(r"^\| (.+) \| ((?:forget|keep).*) \| (.+) \|$", page, re.MULTILINE)
    told = [(set(names.replace(" of ", " ").split(", ")), cursor, first) for names, cursor, first in rows]
    for row in ROWS:
        names = {status.split(" ", 1)[-1] for status in row["statuses"]}
        if "retry_seconds" in row:
            names = {"any with RetryInfo"}
        assert (names, row["cursor"], row["first"]) in told
    assert len(told) == len({(row["cursor"], row["first"], "retry_seconds" in row) for row in ROWS})
