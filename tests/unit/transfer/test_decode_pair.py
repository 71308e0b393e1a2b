"""When decode dials a prefill rank, when it gives it up, and what tables say of it (rule 3, break and loss)."""

from __future__ import annotations

import pytest

from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.decode.pair import DecodePair
from kvgrpc.transfer.protocol.types import RoomKey, SessionState, Target, Timing

TIMING = Timing()
BEGIN = 1000
IDLE = TIMING.idle_timeout
LONG = TIMING.connect_within  # for which a stream stood


@pytest.fixture
def pair() -> DecodePair:
    return DecodePair(Target(RankRef(RankId("prefill", 0, 0, 0, 0), 1), "127.0.0.1:1", None, None), BEGIN)


def welcomed(pair: DecodePair, now: int = BEGIN) -> DecodePair:
    pair.dial(1, now, TIMING)
    pair.welcome(now, IDLE)
    return pair


def test_tables_say_how_the_session_stands(pair: DecodePair) -> None:
    seen = [pair.state]
    welcomed(pair)
    seen.append(pair.state)
    pair.broke(BEGIN + 1, TIMING)
    seen.append(pair.state)
    pair.lost = True
    seen.append(pair.state)
    pair.dead_at = 0
    seen.append(pair.state)
    assert seen == [
        *(SessionState.CONNECTING, SessionState.OPEN, SessionState.BROKEN, SessionState.LOST, SessionState.DEAD)
    ]


def test_a_tick_has_nothing_to_do_for_a_pair_that_was_heard_of_lately(pair: DecodePair) -> None:
    assert not pair.is_well(BEGIN, 30)
    welcomed(pair)
    assert pair.is_well(BEGIN + 30, 30) and not pair.is_well(BEGIN + 31, 30)
    assert not pair.is_well(BEGIN + IDLE + 1, 10 * IDLE)
    pair.silent = True
    assert not pair.is_well(BEGIN, 30)


def test_a_pair_is_dialled_at_once_and_again_when_a_dial_was_not_answered(pair: DecodePair) -> None:
    assert pair.dial_is_due(BEGIN, TIMING) and not pair.is_dialling(BEGIN, TIMING)
    pair.dial(1, BEGIN, TIMING)
    last = BEGIN + TIMING.abandon_dial
    assert pair.is_dialling(last, TIMING) and not pair.dial_is_due(last, TIMING)
    assert not pair.is_dialling(last + 1, TIMING) and pair.dial_is_due(last + 1, TIMING)


def test_a_dial_of_a_lost_pair_is_replaced_no_sooner_than_its_pause(pair: DecodePair) -> None:
    pair.lost = True
    pair.backoff = TIMING.abandon_dial * 2
    pair.dial(1, BEGIN, TIMING)
    assert pair.backoff > TIMING.abandon_dial
    assert not pair.dial_is_due(BEGIN + pair.backoff, TIMING)
    assert pair.dial_is_due(BEGIN + pair.backoff + 1, TIMING)


def test_pauses_double_from_the_first_to_the_longest(pair: DecodePair) -> None:
    pair.lost = True
    pauses = []
    for number in range(12):
        pair.dial(number, BEGIN, TIMING)
        pauses.append(pair.backoff)
    assert pauses[:3] == [TIMING.first_backoff, 2 * TIMING.first_backoff, 4 * TIMING.first_backoff]
    assert pauses[-1] == TIMING.longest_backoff


def test_a_stream_that_stood_for_long_is_dialled_anew_at_once_one_that_did_not_is_not(pair: DecodePair) -> None:
    welcomed(pair)
    pause = pair.backoff
    pair.broke(BEGIN + LONG, TIMING)
    assert (pair.backoff, pair.next_dial_at) == (pause, BEGIN + pause)
    again = welcomed(pair, BEGIN + 2 * LONG)
    broken_at = BEGIN + 3 * LONG + 1
    again.broke(broken_at, TIMING)
    assert (again.backoff, again.next_dial_at, again.up, again.stream) == (0, broken_at, False, None)


def test_a_dial_ends_what_stood_before_it(pair: DecodePair) -> None:
    stream = welcomed(pair).dial(2, BEGIN + 5, TIMING)
    assert (pair.up, pair.stream, pair.dialled_at) == (False, stream, BEGIN + 5)


def test_a_silent_peer_is_given_up_after_the_time_that_it_said_itself(pair: DecodePair) -> None:
    pair.welcome(BEGIN, 7)
    assert pair.given_up(BEGIN + 7, TIMING) == ""
    assert pair.given_up(BEGIN + 8, TIMING) == "not a word for 700 ms, though its connection stood"


def test_a_first_dial_and_a_break_have_times_of_their_own(pair: DecodePair) -> None:
    first = TIMING.connect_within
    assert pair.given_up(BEGIN + first, TIMING) == ""
    assert pair.given_up(BEGIN + first + 1, TIMING) == "not reached within 3000 ms"
    welcomed(pair, BEGIN + 1).broke(BEGIN + 10, TIMING)
    pair.broke(BEGIN + 12, TIMING)  # the first break counts
    last = BEGIN + 10 + TIMING.welcome_within
    assert pair.given_up(last, TIMING) == ""
    assert pair.given_up(last + 1, TIMING).endswith("of a break")


def test_a_peer_whose_connection_stands_is_waited_for_as_long_as_one_that_was_welcomed(pair: DecodePair) -> None:
    pair.dial(1, BEGIN, TIMING)
    pair.connect(BEGIN + 1)
    last = BEGIN + TIMING.silence
    assert pair.given_up(last, TIMING) == "" and pair.given_up(last + 1, TIMING).startswith("not a word for 60000 ms")
    assert pair.is_dialling(last, TIMING) and not pair.dial_is_due(last, TIMING), "another would get no further"
    assert pair.dial_is_due(BEGIN + 1 + TIMING.silence + 1, TIMING)


@pytest.mark.parametrize("connected_for", [TIMING.welcome_within, TIMING.welcome_within + 1])
def test_a_connection_that_stood_gives_the_next_one_its_time_and_one_that_ended_at_once_does_not(
    pair: DecodePair, connected_for: int
) -> None:
    welcomed(pair).broke(BEGIN + 5, TIMING)
    pair.dial(2, BEGIN + 5, TIMING)
    pair.connect(BEGIN + 6)
    ended_at = BEGIN + 6 + connected_for
    pair.broke(ended_at, TIMING)
    stood = connected_for > TIMING.welcome_within
    assert bool(pair.given_up(ended_at + 1, TIMING)) is not stood
    assert pair.given_up(ended_at + TIMING.welcome_within + 1, TIMING).endswith("of a break")


def test_a_break_that_comes_out_of_silence_counts_from_three_seconds_after_the_last_word(pair: DecodePair) -> None:
    welcomed(pair).broke(BEGIN + TIMING.ping_timeout, TIMING)  # the ping went out just before the peer was stopped
    last = BEGIN + TIMING.ping_interval + TIMING.ping_timeout + TIMING.welcome_within
    assert pair.given_up(last, TIMING) == "" and pair.given_up(last + 1, TIMING).endswith("of a break")


def test_a_second_room_that_comes_after_a_break_does_not_put_off_its_end(pair: DecodePair) -> None:
    pair.rooms[RoomKey(7)] = None
    welcomed(pair).broke(BEGIN + 5, TIMING)
    pair.wait(BEGIN + 10)
    assert pair.given_up(BEGIN + 5 + TIMING.welcome_within + 1, TIMING).endswith("of a break")


def test_a_room_gives_a_pair_that_is_not_up_the_time_of_a_first_dial_and_a_lost_one_a_dial_at_once(
    pair: DecodePair,
) -> None:
    welcomed(pair).wait(BEGIN + 1)
    assert pair.waiting_since is None, "nothing is waited for while the stream stands"
    pair.broke(BEGIN + 2, TIMING)
    due = pair.next_dial_at
    pair.wait(BEGIN + 3)
    assert (pair.waiting_since, pair.next_dial_at) == (BEGIN + 3, due)
    pair.wait(BEGIN + 4)
    assert pair.waiting_since == BEGIN + 3, "the first room counts"
    pair.waiting_since, pair.lost, pair.next_dial_at = None, True, BEGIN + 10_000
    pair.wait(BEGIN + 5)
    assert pair.next_dial_at == BEGIN + 5
    pair.welcome(BEGIN + 6, IDLE)
    assert (pair.lost, pair.waiting_since) == (False, None)
