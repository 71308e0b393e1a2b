"""The log: what was appended is read back in order, or the reader is told why not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.errors import EventsCompacted
from kvgrpc.events.log.journal import _COMPACT_AT, Batches, DroppedRange, Journal, JournalLimits

payloads = st.binary(min_size=1, max_size=40)
# A payload, or a hole of so many sequences.
entries = st.lists(payloads | st.integers(1, 5), max_size=60)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class NaiveLog:
    """The same promises, kept in one list of (sequence, entry) without any care for speed."""

    def __init__(self, limits: JournalLimits) -> None:
        self.limits = limits
        self.kept: list[tuple[int, bytes | DroppedRange]] = []
        self.next = 0

    def append(self, entry: bytes | DroppedRange) -> None:
        self.kept.append((self.next, entry))
        self.next = entry.last + 1 if isinstance(entry, DroppedRange) else self.next + 1

    def evict(self) -> None:
        while self.kept and (len(self.kept) > self.limits.batches or self.size() > self.limits.bytes):
            self.kept.pop(0)

    def size(self) -> int:
        return sum(len(entry) for _, entry in self.kept if isinstance(entry, bytes))

    @property
    def oldest(self) -> int:
        return self.kept[0][0] if self.kept else self.next

    def told(self, first: int, last: int) -> list[bytes | str]:
        """One value for each sequence: its payload, or why it has none."""
        told: list[bytes | str] = []
        for begin, entry in self.kept:
            end = entry.last if isinstance(entry, DroppedRange) else begin
            for sequence in range(max(begin, first), min(end, last) + 1):
                assert first + len(told) == sequence
                told.append(entry.cause if isinstance(entry, DroppedRange) else entry)
        return told


def journal(batches: int = 100, size: int = 10_000, age: float = 1e9, clock: Clock | None = None) -> Journal:
    return Journal(JournalLimits(batches, size, age), clock or Clock())


def read_all(log: Journal, first: int, last: int | None, limit: int) -> list[bytes | str]:
    told: list[bytes | str] = []
    while (last is None or first + len(told) <= last) and (part := log.read(first + len(told), last, limit)):
        if isinstance(part, Batches):
            assert part.first == first + len(told)
            assert len(part.payloads) == 1 or sum(map(len, part.payloads)) <= limit
            told += part.payloads
        else:
            assert part.first == first + len(told)
            told += [part.cause] * (part.last - part.first + 1)
    return told


@given(entries, st.integers(1, 20), st.integers(1, 200), st.integers(1, 200), st.data())
def test_it_reads_like_a_naive_list(
    appended: list[bytes | int], batches: int, size: int, chunk: int, data: st.DataObject
) -> None:
    log, naive = journal(batches, size), NaiveLog(JournalLimits(batches, size))
    while appended:
        count = data.draw(st.integers(1, len(appended)))
        group: list[bytes | DroppedRange] = []
        for entry in appended[:count]:
            group.append(
                DroppedRange(naive.next, naive.next + entry - 1, "encode") if isinstance(entry, int) else entry
            )
            naive.append(group[-1])
        appended = appended[count:]
        log.extend(group)
        naive.evict()
        assert (log.oldest_sequence, log.next_sequence, log.kept_bytes) == (naive.oldest, naive.next, naive.size())
        first = data.draw(st.integers(naive.oldest, naive.next))
        last = data.draw(st.none() | st.integers(first, naive.next + 3))
        assert read_all(log, first, last, chunk) == naive.told(first, naive.next - 1 if last is None else last)


def test_what_was_evicted_is_an_error_that_says_where_to_go_on() -> None:
    log = journal(batches=2)
    log.extend([b"a", b"b", b"c"])
    with pytest.raises(EventsCompacted) as caught:
        log.read(0)
    assert caught.value.metadata == {
        "log": log.log_id,
        "requestedSequence": "0",
        "oldestSequence": "1",
        "nextSequence": "3",
    }


def test_batches_know_their_last_sequence() -> None:
    assert Batches(4, [b"a", b"b", b"c"]).last == 6


def test_what_is_not_there_yet_is_nothing() -> None:
    log = journal()
    assert log.read(0) is None
    log.extend([b"a"])
    assert log.read(1) is None


def test_a_payload_above_the_chunk_comes_alone() -> None:
    log = journal()
    log.extend([b"a", b"b" * 100, b"c"])
    assert log.read(0, limit=10) == Batches(0, [b"a"])
    assert log.read(1, limit=10) == Batches(1, [b"b" * 100])


def test_a_reader_inside_a_hole_is_told_the_rest_of_it() -> None:
    log = journal()
    log.extend([DroppedRange(0, 9, "queue_full"), b"clear"])
    assert log.read(4) == DroppedRange(4, 9, "queue_full")
    assert log.read(4, last=6) == DroppedRange(4, 6, "queue_full")


def test_age_evicts_also_when_nothing_comes() -> None:
    clock = Clock()
    log = journal(age=10, clock=clock)
    log.extend([b"a"])
    clock.now = 5
    log.extend([b"b"])
    clock.now = 11
    log.evict_old()
    assert (log.oldest_sequence, log.next_sequence, log.kept_bytes) == (1, 2, 1)


def test_an_entry_is_kept_to_the_end_of_its_age() -> None:
    clock = Clock()
    log = journal(age=10, clock=clock)
    log.extend([b"a"])
    clock.now = 10
    log.extend([])
    assert log.oldest_sequence == 0
    clock.now = 10.5
    log.extend([])
    assert log.oldest_sequence == 1


def test_what_was_evicted_is_held_no_longer() -> None:
    log = journal(batches=1)
    log.extend([b"a" * 100, DroppedRange(1, 3, "encode"), b"b" * 100])
    assert sum(len(entry) for entry in log._entries if isinstance(entry, bytes)) == log.kept_bytes == 100
    assert not any(isinstance(entry, DroppedRange) for entry in log._entries) and not log._holes


def test_a_hole_elsewhere_than_at_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="hole at 0"):
        journal().extend([DroppedRange(3, 4, "encode")])


def test_long_logs_keep_only_what_the_limits_say() -> None:
    log = journal(batches=10)
    for number in range(5_000):
        log.extend([b"%d" % number])
    assert log.read(4_990) == Batches(4_990, [b"%d" % number for number in range(4_990, 5_000)])
    assert len(log._entries) < 2_100


def test_each_log_has_its_own_id() -> None:
    first, second = journal().log_id, journal().log_id
    assert first != second
    assert len(first) == 32
    assert int(first, 16) >= 0


@pytest.mark.parametrize("kept", [10, _COMPACT_AT + 500])
def test_what_is_gone_takes_no_room_for_long(kept: int) -> None:
    """Room is made where that moves no more than it frees."""
    log, most = journal(batches=kept), 0
    for number in range(3 * (kept + _COMPACT_AT)):
        log.extend([number.to_bytes(2, "big")])
        most = max(most, len(log._entries))
        assert log.oldest_sequence == max(0, number + 1 - kept)
    assert most == kept - 1 + max(_COMPACT_AT, kept)
