"""Log lines are one printable line each, and many of a kind become a count."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvgrpc.observability.logging import RateLimited, one_line

logger = logging.getLogger("kvgrpc.test")


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_many_lines_of_one_reason_become_a_count(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limited = RateLimited(logger, lines=3, seconds=10.0)
    for number in range(1000):
        limited.warning("PEER_LOST", f"room {number}")
    limited.warning("ROOM_DEADLINE", "another reason has lines of its own")
    limited.flush()
    assert len(caplog.records) == 4
    now = 111.0
    limited.flush()
    limited.flush()
    assert caplog.records[-1].getMessage() == "997 more like these of PEER_LOST in 10 s"
    assert len(caplog.records) == 5
    assert all(record.exc_info is None for record in caplog.records)


def test_the_next_line_of_a_kind_says_how_many_were_left_out_before_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who never flushes loses no count, and hears again of what lasts."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limited = RateLimited(logger, lines=1, seconds=30.0)
    for _ in range(3):
        limited.warning("file", "the store is down")
    now = 131.0
    limited.warning("file", "the store is down")
    assert caplog.messages == ["the store is down", "2 more like these of file in 30 s", "the store is down"]


def test_an_error_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimited(logger, lines=1)
    for _ in range(2):
        try:
            raise KeyError("lost")
        except KeyError:
            limited.exception("passes", "a pass failed")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "KeyError" in caplog.text


def test_lines_from_many_threads_are_all_shown_or_counted(caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimited(logger, lines=5, seconds=0.0005)

    def say() -> None:
        for _ in range(500):
            limited.warning("a kind", "said")

    with ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            threads.submit(say)
        for _ in range(200):
            limited.flush()
    while limited._windows:
        limited.flush()
    counted = sum(int(text.split()[0]) for text in caplog.messages if text != "said")
    assert caplog.messages.count("said") + counted == 8 * 500


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain words, ümlaut", "plain words, ümlaut"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\u202eevil\u200b", "\\u202eevil\\u200b"),
        ("\udcff", "\\udcff"),
        ("x" * 500, "x" * 397 + "..."),
    ],
)
def test_text_of_others_is_one_printable_line(text: str, shown: str) -> None:
    assert one_line(text) == shown
    shown.encode()
