"""What a follower does with each thing that a Watch or PUB may say, one at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import pytest

from kvgrpc.errors import EventsCompacted, FeatureDisabled, InvalidRequest, PeerUnreachable, StaleLog
from kvgrpc.events.following.follower import HIDE_AFTER_SECONDS, FollowerCore
from kvgrpc.events.following.index import BlockIndex
from kvgrpc.events.following.messages import CloseWatch, FollowerState, Mode, OpenWatch, ResetLive
from kvgrpc.events.following.sources import freshness
from kvgrpc.events.log.digest import StateDigest, TierDigest, mix
from kvgrpc.events.model import BlockStored, UnknownEvent

BROKEN = PeerUnreachable("broken")
OTHER = StaleLog("another log")


def decode(payload: bytes) -> Iterable[object]:
    if payload == b"junk":
        raise msgspec.DecodeError("no batch")
    if payload == b"moved":
        return [UnknownEvent("BlockMoved", payload)]
    return [BlockStored([int(payload)], None, [], 16)]


def digest(next_sequence: int, *blocks: int) -> StateDigest:
    return StateDigest(next_sequence, (TierDigest("GPU", 0, len(blocks), sum(map(mix, blocks)) % 2**64),))


def started(*, live: bool = False) -> FollowerCore:
    """A follower whose first Watch, number 1, is open and not answered."""
    core = FollowerCore(BlockIndex(), decode, live=live, jitter=lambda: 1.0)
    core.start()
    assert core.take_commands() == [OpenWatch(1, Mode.SNAPSHOT)]
    return core


def rebuilt(*, live: bool = False, upcoming: int = 2) -> FollowerCore:
    """One that has blocks 1 and 2 of a snapshot at sequence 2, and reads on in the same Watch."""
    core = started(live=live)
    core.begun(1, "log", upcoming, 0, 0.0)
    core.snapshot(1, 0, 2, [b"1", b"2"], 0.0)
    core.snapshot_complete(1, digest(2, 1, 2), 0.0)
    return core


def listening() -> FollowerCore:
    """One that has the same, and hears the rest over PUB beside Watch 2."""
    core = rebuilt(live=True)
    assert core.take_commands() == [CloseWatch(1), OpenWatch(2, Mode.HEARTBEAT, "log")]
    core.begun(2, "log", 2, 2, 0.0)
    assert not core.take_commands()
    return core


def tailing(first: int, *, live: bool = False) -> FollowerCore:
    """One that reads the log, in Watch 2, of a publisher that keeps no snapshots."""
    core = started(live=live)
    core.ended(1, FeatureDisabled("no snapshots"), 0.0)
    assert core.take_commands() == [CloseWatch(1), OpenWatch(2, Mode.TAIL)]
    core.begun(2, "log", first, first, 0.0)
    core.take_commands()
    return core


def shown(core: FollowerCore) -> set[int]:
    return {block for block in range(1, 10) if core._index.score([block])}


def caches(core: FollowerCore) -> int:
    """How many the index has room for."""
    return sum(cache is not None for cache in core._index._caches)


class TestSnapshots:
    def test_one_that_nobody_answered_knows_nothing_and_lacks_nothing(self) -> None:
        core = started()
        assert (core.state, core.next_sequence, core.lag, core.heard_at) == (FollowerState.CONNECTING, 0, 0, None)
        core.begun(1, "log", 0, 0, 3.0)
        assert (core.state, core.lag, core.heard_at) == (FollowerState.CONNECTING, 0, 3.0)
        core.snapshot(1, 0, 0, [], 3.0)
        assert core.state is FollowerState.REBUILDING
        core.snapshot_complete(1, None, 3.0)
        assert core.state is FollowerState.CURRENT

    def test_it_may_be_newer_than_what_the_watch_said_at_first(self) -> None:
        core = rebuilt(upcoming=1)
        assert (core.known_next, core.counts.snapshots, shown(core)) == (2, 1, {1, 2})

    def test_one_that_begins_again_takes_the_place_of_what_had_come(self) -> None:
        core = started()
        core.begun(1, "log", 2, 0, 0.0)
        core.snapshot(1, 0, 2, [b"1"], 0.0)
        core.snapshot(1, 0, 2, [b"2"], 0.0)
        assert caches(core) == 1
        core.snapshot_complete(1, digest(2, 2), 0.0)
        assert shown(core) == {2}

    def test_one_that_cannot_be_read_is_told_and_asked_for_again(self) -> None:
        core = started()
        core.begun(1, "log", 2, 0, 0.0)
        core.snapshot(1, 0, 2, [b"1", b"junk"], 0.0)
        assert (core.counts.undecodable, core.counts.failures, caches(core)) == (1, 1, 0)
        assert isinstance(core.last_error, msgspec.DecodeError) and core.state is FollowerState.CONNECTING
        assert core.take_commands() == [CloseWatch(1)]
        at = core.wake_at
        assert at is not None and at == pytest.approx(0.1)
        core.tick(at - 0.05)
        assert not core.take_commands()
        core.tick(at)
        assert core.take_commands() == [OpenWatch(2, Mode.SNAPSHOT)]

    def test_one_that_does_not_come_to_its_own_digest_is_not_shown(self) -> None:
        core = started()
        core.begun(1, "log", 2, 0, 0.0)
        core.snapshot(1, 0, 2, [b"1"], 0.0)
        core.snapshot_complete(1, digest(2, 1, 2), 0.0)
        assert (core.counts.digests_different, core.counts.failures, core.counts.snapshots) == (1, 1, 0)
        assert (core.contents, caches(core), shown(core)) == (None, 0, set())
        assert "own digest" in str(core.last_error) and core.take_commands() == [CloseWatch(1)]

    def test_half_of_one_goes_with_its_watch(self) -> None:
        for stopped in (False, True):
            core = started()
            core.begun(1, "log", 2, 0, 0.0)
            core.snapshot(1, 0, 2, [b"1"], 0.0)
            if stopped:
                core.stop()
            else:
                core.ended(1, BROKEN, 0.0)
            assert caches(core) == 0 and core.state is FollowerState.CONNECTING

    def test_a_publisher_that_keeps_none_is_read_from_its_oldest_batch(self) -> None:
        for refused in (FeatureDisabled("no snapshots"), InvalidRequest("what?", metadata={"field": "mode"})):
            core = started()
            core.ended(1, refused, 0.0)
            assert core.take_commands() == [CloseWatch(1), OpenWatch(2, Mode.TAIL)]
        core = started()
        core.ended(1, InvalidRequest("what?", metadata={"field": "engine"}), 0.0)
        assert core.take_commands() == [CloseWatch(1)], "which says nothing of snapshots"

    @pytest.mark.parametrize("first", [0, 1])
    def test_only_a_log_that_is_read_from_its_first_batch_is_known_whole(self, first: int) -> None:
        core = tailing(first)
        assert core.contents is not None
        assert (core.contents.whole, core.next_sequence) == (first == 0, first)

    def test_whoever_answers_after_a_failure_may_keep_snapshots(self) -> None:
        core = started()
        core.ended(1, FeatureDisabled("no snapshots"), 0.0)
        core.ended(2, BROKEN, 0.0)
        core.take_commands()
        core.tick(10.0)
        assert core.take_commands() == [OpenWatch(3, Mode.SNAPSHOT)]

    def test_one_that_has_contents_goes_on_with_them_until_it_is_behind(self) -> None:
        core = tailing(0)
        core.ended(2, BROKEN, 0.0)
        core.tick(10.0)
        assert core.take_commands() == [CloseWatch(2), OpenWatch(3, Mode.TAIL, "log", 0)]
        core.ended(3, EventsCompacted("too old"), 10.0)
        assert core.contents is not None
        assert core.take_commands() == [CloseWatch(3), OpenWatch(4, Mode.SNAPSHOT)], "whoever answers may keep them now"

    def test_a_batch_that_cannot_be_read_is_passed_where_no_snapshot_makes_up_for_it(self) -> None:
        core = tailing(0)
        core.batches(2, 0, [b"1", b"junk", b"3"], 0.0)
        assert core.contents is not None
        assert (shown(core), core.next_sequence, core.contents.whole) == ({3}, 3, False)
        assert (core.counts.undecodable, core.take_commands()) == (1, [])
        assert isinstance(core.last_error, msgspec.DecodeError)

    def test_old_contents_go_where_no_snapshot_takes_their_place(self) -> None:
        core = rebuilt()
        core.ended(1, BROKEN, 0.0)
        core.tick(10.0)
        core.ended(2, EventsCompacted("too old"), 10.0)
        assert core.take_commands()[-1] == OpenWatch(3, Mode.SNAPSHOT) and shown(core) == {1, 2}
        core.ended(3, FeatureDisabled("no snapshots"), 10.0)
        assert core.take_commands()[-1] == OpenWatch(4, Mode.TAIL) and shown(core) == set()


class TestLogs:
    def test_two_publishers_at_one_address_are_not_asked_for_their_states_without_a_pause(self) -> None:
        core = listening()
        core.ended(2, OTHER, 0.0)
        assert core.take_commands()[-1] == OpenWatch(3, Mode.SNAPSHOT)
        core.begun(3, "other", 0, 0, 0.0)
        core.snapshot(3, 0, 0, [], 0.0)
        core.snapshot_complete(3, None, 0.0)
        assert core.take_commands()[-1] == OpenWatch(4, Mode.HEARTBEAT, "other")
        core.ended(4, OTHER, 0.1)
        assert core.take_commands() == [CloseWatch(4)]
        core.tick(3.0)
        assert core.take_commands() == [OpenWatch(5, Mode.SNAPSHOT)]

    def test_nothing_of_another_log_is_shown(self) -> None:
        core = rebuilt()
        core.ended(1, OTHER, 0.0)
        assert (core.contents, shown(core)) == (None, set())
        assert core.take_commands() == [CloseWatch(1)]
        core.tick(1.0)
        assert core.take_commands() == [OpenWatch(2, Mode.SNAPSHOT)]
        core.begun(2, "other", 0, 0, 0.0)
        assert (core.state, core.counts.new_logs, core.log_id) == (FollowerState.CONNECTING, 1, "other")
        assert (core.known_next, core.lag) == (0, 0)

    def test_a_snapshot_of_another_log_ends_what_was_shown_of_the_first(self) -> None:
        core = rebuilt()
        core.ended(1, BROKEN, 0.0)
        core.tick(10.0)
        core.ended(2, EventsCompacted("too old"), 10.0)
        core.take_commands()
        core.begun(3, "other", 0, 0, 10.0)
        assert (core.contents, shown(core), core.lag) == (None, set(), 0)
        assert core.take_commands() == [ResetLive()], "what waits in the subscription is of the first log"

    def test_the_first_log_is_no_new_one(self) -> None:
        core = started()
        core.begun(1, "log", 5, 0, 0.0)
        assert (core.counts.new_logs, core.take_commands(), core.lag) == (0, [], 5)

    def test_what_pub_brought_of_one_log_is_not_taken_for_another(self) -> None:
        core = listening()
        core.live(6, b"6", 0.0)
        assert core.take_commands() == [OpenWatch(3, Mode.REPLAY, "log", 2, 5)]
        core.ended(2, OTHER, 0.0)
        core.begun(4, "other", 6, 0, 0.0)
        core.snapshot(4, 0, 6, [b"5"], 0.0)
        core.snapshot_complete(4, None, 0.0)
        core.begun(5, "other", 6, 6, 0.0)
        assert (core.next_sequence, shown(core)) == (6, {5})
        core.take_commands()
        core.heartbeat(5, 7, None, 1.0)
        assert not core.take_commands(), "a batch may still be on its way"
        core.heartbeat(5, 7, None, 2.0)
        assert core.take_commands() == [OpenWatch(6, Mode.REPLAY, "other", 6, 6)]

    def test_what_one_log_promised_is_not_asked_of_another(self) -> None:
        core = listening()
        core.heartbeat(2, 50, None, 0.0)
        core.ended(2, OTHER, 0.0)
        core.begun(3, "other", 3, 0, 0.0)
        core.snapshot(3, 0, 3, [], 0.0)
        core.snapshot_complete(3, None, 0.0)
        core.begun(4, "other", 3, 3, 0.0)
        core.take_commands()
        core.heartbeat(4, 3, None, 0.0)
        assert not core.take_commands()


class TestBatches:
    def test_one_that_is_in_already_is_passed_over_and_what_follows_it_is_taken(self) -> None:
        core = rebuilt()
        core.batches(1, 1, [b"9", b"3"], 0.0)
        assert (core.next_sequence, core.known_next, core.counts.batches) == (3, 3, 1)
        assert shown(core) == {1, 2, 3}

    def test_a_watch_that_leaves_one_out_is_ended(self) -> None:
        core = rebuilt()
        core.batches(1, 3, [b"4", b"5"], 0.0)
        assert (core.counts.failures, core.next_sequence, shown(core)) == (1, 2, {1, 2})
        assert "from 2 to 3" in str(core.last_error) and core.take_commands() == [CloseWatch(1)]

    def test_one_that_cannot_be_read_ends_what_is_shown(self) -> None:
        core = rebuilt()
        core.batches(1, 2, [b"junk", b"4"], 0.0)
        assert (core.counts.undecodable, core.counts.failures, core.counts.batches) == (1, 1, 0)
        assert (core.contents, shown(core), core.take_commands()) == (None, set(), [CloseWatch(1)])

    def test_a_hole_is_passed_over_and_compared_behind(self) -> None:
        core = rebuilt()
        core.heartbeat(1, 3, digest(5, 1, 2), 0.0)
        core.dropped(1, 2, 4, 0.0)
        assert (core.next_sequence, core.known_next, core.counts.digests_equal) == (5, 5, 1)
        core.dropped(1, 7, 8, 0.0)
        assert core.next_sequence == 5

    def test_a_watch_that_was_closed_is_not_heard(self) -> None:
        core = rebuilt()
        core.begun(9, "other", 9, 0, 5.0)
        core.batches(9, 2, [b"3"], 5.0)
        core.dropped(9, 2, 4, 5.0)
        core.heartbeat(9, 9, None, 5.0)
        core.snapshot(9, 0, 7, [], 5.0)
        core.snapshot_complete(9, None, 5.0)
        core.ended(9, BROKEN, 5.0)
        assert (core.log_id, core.next_sequence, core.known_next, core.heard_at) == ("log", 2, 2, 0.0)
        assert core.state is FollowerState.CURRENT and not core.take_commands()
        core.snapshot(1, 0, 7, [b"7"], 5.0)
        core.snapshot_complete(9, None, 5.0)
        assert core.state is FollowerState.REBUILDING and shown(core) == {1, 2}

    def test_what_comes_before_any_contents_is_let_go(self) -> None:
        core = started()
        core.begun(1, "log", 3, 0, 0.0)
        core.batches(1, 2, [b"3"], 0.0)
        core.dropped(1, 2, 3, 0.0)
        core.heartbeat(1, 3, None, 0.0)
        core.snapshot_complete(1, None, 0.0)
        assert core.contents is None and not core.take_commands() and core.counts.failures == 0


class TestDigests:
    def test_each_is_compared_once(self) -> None:
        core = rebuilt()
        core.heartbeat(1, 2, digest(2, 1, 2), 0.0)
        core.heartbeat(1, 2, None, 0.0)
        core.batches(1, 2, [b"3"], 0.0)
        assert (core.counts.digests_equal, core.counts.digests_different) == (1, 0)

    def test_another_one_ends_what_is_shown(self) -> None:
        core = rebuilt()
        core.heartbeat(1, 4, digest(3, 1, 2), 0.0)
        core.batches(1, 2, [b"3", b"4"], 0.0)
        assert (core.counts.digests_equal, core.counts.digests_different, core.counts.failures) == (0, 1, 1)
        assert (core.contents, shown(core), core.take_commands()) == (None, set(), [CloseWatch(1)])

    def test_one_of_a_moment_that_nobody_kept_says_nothing(self) -> None:
        core = rebuilt()
        core.batches(1, 2, [b"3"], 0.0)
        core.heartbeat(1, 3, digest(2, 7), 0.0)
        assert (core.counts.digests_different, core.counts.failures, shown(core)) == (0, 0, {1, 2, 3})

    def test_one_of_a_moment_that_nobody_kept_holds_nothing_up(self) -> None:
        core = rebuilt(live=True, upcoming=3)
        core.batches(1, 2, [], 0.0)
        assert not core.take_commands(), "a batch is missing"
        core.heartbeat(1, 3, digest(1, 7), 0.0)
        core.dropped(1, 2, 2, 0.0)
        core.heartbeat(1, 3, digest(1, 7), 0.0)
        assert core.take_commands() == [CloseWatch(1), OpenWatch(2, Mode.HEARTBEAT, "log")]

    def test_a_cache_that_is_not_known_whole_is_not_compared(self) -> None:
        core = tailing(3)
        core.heartbeat(2, 3, digest(3, 1, 2), 0.0)
        assert core.counts.digests_different == 0 and core.contents is not None


class TestPub:
    def test_it_brings_the_rest_once_nothing_is_missing(self) -> None:
        core = rebuilt(live=True, upcoming=4)
        assert not core.take_commands()
        core.batches(1, 2, [b"3"], 0.0)
        assert not core.take_commands()
        core.batches(1, 3, [b"4"], 0.0)
        assert core.take_commands() == [CloseWatch(1), OpenWatch(2, Mode.HEARTBEAT, "log")]

    def test_what_it_brings_waits_until_the_log_is_known_to_be_the_same(self) -> None:
        core = rebuilt(live=True)
        core.take_commands()
        core.live(2, b"3", 0.0)
        assert core.next_sequence == 2
        core.begun(2, "log", 3, 2, 0.0)
        assert core.next_sequence == 3 and not core.take_commands()

    def test_what_was_published_before_the_watch_and_did_not_come_is_read(self) -> None:
        core = rebuilt(live=True)
        core.take_commands()
        core.begun(2, "log", 5, 2, 0.0)
        assert core.take_commands() == [OpenWatch(3, Mode.REPLAY, "log", 2, 4)]
        assert (core.counts.gaps, core.counts.replays) == (1, 1)

    def test_a_hole_is_read_again_and_what_waited_behind_it_is_taken(self) -> None:
        core = listening()
        core.live(2, b"3", 0.0)
        core.live(5, b"6", 0.0)
        assert core.take_commands() == [OpenWatch(3, Mode.REPLAY, "log", 3, 4)]
        assert (core.counts.gaps, core.counts.replays) == (1, 1)
        core.live(6, b"7", 0.0)
        assert not core.take_commands(), "one is read at a time"
        core.begun(3, "log", 7, 3, 0.0)
        core.batches(3, 3, [b"4", b"5"], 0.0)
        core.ended(3, None, 0.0)
        assert (core.next_sequence, shown(core)) == (7, {1, 2, 3, 4, 5, 6, 7})

    def test_frames_that_came_twice_hide_no_hole_behind_them(self) -> None:
        core = rebuilt(live=True)
        core.take_commands()
        core.live(1, b"2", 0.0)
        core.live(4, b"5", 0.0)
        core.begun(2, "log", 2, 2, 0.0)
        assert core.take_commands() == [OpenWatch(3, Mode.REPLAY, "log", 2, 3)]

    def test_numbers_that_go_back_are_asked_about_once(self) -> None:
        core = listening()
        core.live(7, b"8", 0.0)
        core.live(1, b"9", 0.0)
        assert core.take_commands() == [
            OpenWatch(3, Mode.REPLAY, "log", 2, 6), ResetLive(), CloseWatch(2), CloseWatch(3),
            OpenWatch(4, Mode.HEARTBEAT, "log"),
        ]  # fmt: skip
        core.begun(4, "log", 2, 2, 0.0)
        core.live(2, b"3", 0.0)
        assert (core.next_sequence, core.take_commands()) == (3, [])

    def test_what_it_says_before_any_contents_is_let_go(self) -> None:
        core = started(live=True)
        core.live(9, b"9", 0.0)
        core.begun(1, "log", 2, 0, 0.0)
        core.snapshot(1, 0, 2, [b"1"], 0.0)
        core.snapshot_complete(1, None, 0.0)
        core.begun(2, "log", 2, 2, 0.0)
        core.take_commands()
        core.live(2, b"2", 0.0)
        assert (core.next_sequence, core.take_commands()) == (3, [])

    def test_after_a_failure_what_is_missing_is_read_first(self) -> None:
        for upcoming, again in ((2, OpenWatch(3, Mode.HEARTBEAT, "log")), (4, OpenWatch(3, Mode.TAIL, "log", 2))):
            core = listening()
            core.heartbeat(2, upcoming, None, 0.0)
            core.ended(2, BROKEN, 0.0)
            core.tick(10.0)
            assert core.take_commands() == [CloseWatch(2), again]
        core = rebuilt()
        core.ended(1, BROKEN, 0.0)
        core.tick(10.0)
        assert core.take_commands() == [CloseWatch(1), OpenWatch(2, Mode.TAIL, "log", 2)], "without PUB always"


class TestFailures:
    def test_each_is_counted_and_told(self) -> None:
        core = rebuilt()
        core.ended(1, BROKEN, 0.0)
        assert (core.counts.failures, core.last_error, core.state) == (1, BROKEN, FollowerState.CONNECTING)
        assert shown(core) == {1, 2}, "which is merely old"

    def test_a_snapshot_whose_reader_fell_behind_is_not_begun_again_at_once(self) -> None:
        core = rebuilt()
        core.ended(1, EventsCompacted("overtaken"), 0.0)
        assert core.take_commands() == [CloseWatch(1)] and shown(core) == {1, 2}
        assert core.wake_at == pytest.approx(0.1)

    def test_what_is_shown_of_an_engine_that_is_gone_is_hidden_in_time(self) -> None:
        core = rebuilt()
        core.ended(1, BROKEN, 0.0)
        core.tick(1.0)
        assert core.wake_at == HIDE_AFTER_SECONDS
        core.tick(HIDE_AFTER_SECONDS - 0.1)
        assert shown(core) == {1, 2}
        core.tick(HIDE_AFTER_SECONDS)
        assert (shown(core), core.wake_at) == (set(), None)
        core.begun(2, "log", 2, 2, 60.0)
        assert shown(core) == {1, 2}

    def test_one_that_came_back_is_not_hidden(self) -> None:
        core = rebuilt()
        core.ended(1, BROKEN, 0.0)
        core.tick(1.0)
        core.begun(2, "log", 2, 2, 2.0)
        assert core.wake_at is None

    def test_nothing_wakes_one_that_was_stopped(self) -> None:
        core = rebuilt()
        core.ended(1, BROKEN, 0.0)
        core.stop()
        assert (core.wake_at, caches(core)) == (None, 0)


class TestDoubts:
    """An event that cannot be read may be a removal: what is shown may be too much."""

    def test_the_state_says_so_until_a_digest_of_somebody_who_can_read_it_is_equal(self) -> None:
        core = rebuilt(upcoming=2)
        core.batches(1, 2, [b"moved"], 0.0)
        assert (core.state, core.counts.unknown, core.counts.doubts) == (FollowerState.DOUBTFUL, 1, 1)
        core.batches(1, 3, [b"3"], 0.0)
        core.heartbeat(1, 4, replace(digest(4, 1, 2, 3), doubtful=True), 0.0)
        assert core.state is FollowerState.DOUBTFUL and core.counts.digests_equal == 1
        core.heartbeat(1, 4, digest(4, 1, 2, 3), 0.0)
        assert core.state is FollowerState.CURRENT and core.counts.doubts == 1

    def test_a_digest_of_before_the_event_ends_no_doubt(self) -> None:
        core = rebuilt(upcoming=2)
        core.heartbeat(1, 3, None, 0.0)
        core.batches(1, 2, [b"moved"], 0.0)
        assert core.contents is not None
        core.contents._checkpoints[2] = digest(2, 1, 2)
        core.heartbeat(1, 3, digest(2, 1, 2), 0.0)
        assert core.state is FollowerState.DOUBTFUL and core.counts.digests_equal == 1

    def test_a_digest_that_differs_brings_a_snapshot_of_somebody_who_can_read_it(self) -> None:
        core = rebuilt(upcoming=2)
        core.batches(1, 2, [b"moved"], 0.0)
        core.heartbeat(1, 3, digest(3, 2), 0.0)
        core.tick(9.0)
        assert [command for command in core.take_commands() if isinstance(command, OpenWatch)] == [
            OpenWatch(2, Mode.SNAPSHOT)
        ]
        core.begun(2, "log", 3, 0, 9.0)
        core.snapshot(2, 0, 3, [b"2"], 9.0)
        core.snapshot_complete(2, digest(3, 2), 9.0)
        assert core.state is FollowerState.CURRENT and shown(core) == {2}

    def test_a_doubtful_snapshot_is_shown_and_stays_doubtful(self) -> None:
        core = started()
        core.begun(1, "log", 2, 0, 0.0)
        core.snapshot(1, 0, 2, [b"1"], 0.0)
        core.snapshot_complete(1, replace(digest(2, 1), doubtful=True), 0.0)
        assert core.state is FollowerState.DOUBTFUL and shown(core) == {1}
        assert not freshness(core, 0.0).whole

    def test_a_doubtful_digest_that_differs_says_nothing_where_all_was_read(self) -> None:
        core = rebuilt(upcoming=2)
        core.heartbeat(1, 2, replace(digest(2, 1, 2, 3), doubtful=True), 0.0)
        assert core.state is FollowerState.CURRENT and core.counts.digests_different == 0
