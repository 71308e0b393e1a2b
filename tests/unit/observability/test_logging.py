"""Log lines are one printable line each, and many of a kind become a count."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvgrpc.errors import Failure, Reason
from kvgrpc.observability.hand_offs import HandOff, HandOffs
from kvgrpc.observability.logging import JsonLines, RateLimited, _Counts, drop_poller_noise, one_line
from tests.support.waiting import wait_until

logger = logging.getLogger("kvgrpc.test")


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def told(caplog: pytest.LogCaptureFixture, shown: str) -> tuple[int, int]:
    """Lines of ``shown`` in the log, and those that are a number there."""
    return ours(caplog).count(shown), sum(int(text.split()[0]) for text in counts_of(caplog))


def counts_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in ours(caplog) if " more like these of " in text]


def ours(caplog: pytest.LogCaptureFixture, name: str = logger.name) -> list[str]:
    """What this file's logger said: what an earlier test left out may come as a count now."""
    return [record.getMessage() for record in caplog.records if record.name == name]


def test_many_lines_of_one_reason_become_a_count_when_their_time_is_over(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody says another, and nothing ticks."""
    limited = RateLimited(logger, lines=3, seconds=2.0)
    for _ in range(1000):
        limited.warning("PEER_LOST", "a room")
    limited.warning("ROOM_DEADLINE", "another reason has lines of its own")
    wait_until(lambda: sum(told(caplog, "a room")) == 1000)
    assert told(caplog, "a room")[0] < 30
    assert "another reason has lines of its own" in caplog.messages
    assert {text.split(" ", 1)[1] for text in counts_of(caplog)} == {"more like these of PEER_LOST in 2 s"}
    assert all(record.exc_info is None for record in caplog.records)


def test_each_subject_has_one_line_and_all_together_as_many_as_the_key(caplog: pytest.LogCaptureFixture) -> None:
    """A name that is made up for each line is no way round the limit, and one that is there all the time no end of the
    others."""
    limited = RateLimited(logger, lines=3, seconds=5.0)
    for _ in range(10):
        limited.warning("holders", "of P", subject="P")
    limited.warning("holders", "of Q", subject="Q")
    limited.warning("holders", "of nobody")
    for number in range(10):
        limited.warning("holders", "made up", subject=f"made up {number}")
    wait_until(lambda: counts_of(caplog))
    assert ours(caplog) == ["of P", "of Q", "of nobody", "19 more like these of holders in 5 s"]


def test_one_thread_says_counts_while_any_is_owed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = _Counts()
    monkeypatch.setattr("kvgrpc.observability.logging._counts", counts)
    limited = [RateLimited(logger, lines=1, seconds=2.0) for _ in range(20)]
    for each in limited:
        each.warning("a kind", "said")
    assert counts._thread is None
    before = threading.active_count()
    for each in limited:
        each.warning("a kind", "said")
    assert threading.active_count() <= before + 1 and counts._thread is not None
    wait_until(lambda: sum(told(caplog, "said")) == 40)
    wait_until(lambda: counts._thread is None)


def test_a_process_that_ends_says_what_it_left_out() -> None:
    code = (
        "import logging; from kvgrpc.observability.logging import RateLimited; logging.basicConfig()\n"
        "limited = RateLimited(logging.getLogger('kvgrpc'), lines=1, seconds=600)\n"
        "for _ in '12345678': limited.warning('a kind', 'said')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr.splitlines() == ["WARNING:kvgrpc:said", "WARNING:kvgrpc:7 more like these of a kind in 600 s"]


def test_a_forked_child_does_not_say_what_its_parent_left_out() -> None:
    code = (
        "import logging, os; from kvgrpc.observability.logging import RateLimited; logging.basicConfig()\n"
        "limited = RateLimited(logging.getLogger('kvgrpc'), lines=1, seconds=600)\n"
        "for _ in '12345678': limited.warning('a kind', 'said')\n"
        "child = os.fork()\n"
        "if child: os.waitpid(child, 0)\n"
        "else:\n"
        "    for _ in '123': limited.warning('a kind', 'said by the child')\n"
    )
    # What the child leaves out is said by its own end of Python.
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr.count("7 more like these of a kind") == 1
    assert ended.stderr.count("said by the child") == ended.stderr.count("2 more like these of a kind") == 1


def test_the_next_line_of_a_kind_says_how_many_were_left_out_before_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of what lasts are in the order of what happened."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limited = RateLimited(logger, lines=1, seconds=30.0)
    for _ in range(3):
        limited.warning("file", "the store is down")
    now = 131.0
    limited.warning("file", "the store is down")
    assert ours(caplog) == ["the store is down", "2 more like these of file in 30 s", "the store is down"]


def test_an_error_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimited(logger, lines=1)
    for _ in range(2):
        try:
            raise KeyError("lost")
        except KeyError:
            limited.exception("passes", "a pass failed")
    (record,) = [record for record in caplog.records if record.name == logger.name]
    assert record.levelno == logging.ERROR and "KeyError" in caplog.text


def test_lines_from_many_threads_are_all_shown_or_counted(caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimited(logger, lines=5, seconds=0.0005)

    def say() -> None:
        for _ in range(500):
            limited.warning("a kind", "said")

    with ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            threads.submit(say)
    wait_until(lambda: sum(told(caplog, "said")) == 8 * 500)


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


@pytest.mark.parametrize(
    ("where", "error", "is_said"),
    [
        ("PollerCompletionQueue._handle_events", BlockingIOError(), False),
        ("PollerCompletionQueue._handle_events", RuntimeError("Event loop is closed"), False),
        ("PollerCompletionQueue._handle_events", RuntimeError("another"), True),
        ("Rank._look", RuntimeError("Event loop is closed"), True),
    ],
)
def test_what_several_loops_of_grpc_say_of_each_other_is_hidden(
    where: str, error: Exception, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    drop_poller_noise()
    logging.getLogger("asyncio").error("Exception in callback %s", where, exc_info=error)
    assert bool(ours(caplog, "asyncio")) == is_said


def test_a_record_is_one_line_of_json_with_what_it_is_about(caplog: pytest.LogCaptureFixture) -> None:
    failure = Failure(Reason.PEER_LOST, "the peer is \x1b[31mgone\n")
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    room = HandOff(8123, 2, ["P/dp0/pp0/cp0/tp0@5"], 1.0, 0.0, 0.0, 1.25, 4, 4096, traceparent, failure)
    HandOffs("decode", logger).failed(room)
    line = JsonLines().format(caplog.records[-1])
    fields = json.loads(line)
    assert "\n" not in line and line.isascii()
    assert (fields["level"], fields["logger"]) == ("WARNING", "kvgrpc.test")
    assert (fields["room"], fields["attempt"], fields["reason"]) == (8123, 2, "PEER_LOST")
    assert fields["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert fields["peers"] == ["P/dp0/pp0/cp0/tp0@5"]
    assert fields["message"].startswith("room 8123 attempt 2 failed at decode after 0.250 s: PEER_LOST")


def test_json_has_the_traceback_of_an_error(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("it failed")
    fields = json.loads(JsonLines().format(caplog.records[-1]))
    assert fields["message"] == "it failed" and "ValueError: why" in fields["exception"]
    assert fields["time"].endswith("Z")
