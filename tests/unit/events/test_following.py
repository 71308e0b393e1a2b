"""What a follower waits for and keeps, and how a table of followers answers: the parts beside its rules."""

from __future__ import annotations

import msgspec
import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.events.codec import decode_batch
from kvgrpc.events.following import messages
from kvgrpc.events.following.contents import SLICE_BLOCKS, CacheContents
from kvgrpc.events.following.follower import FollowerCore
from kvgrpc.events.following.index import BlockIndex
from kvgrpc.events.following.messages import FollowerState, LiveBuffer, OpenWatch, Retry
from kvgrpc.events.following.sources import Question, SourceTable, Wanted
from kvgrpc.events.log.digest import CHECKPOINT_BATCHES, StateDigest
from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored


def stored(
    *hashes: int,
    medium: str = "GPU",
    group: int | None = None,
    page_tokens: int = 16,
    kind: str | None = None,
    window: int | None = None,
) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        block_size=page_tokens,
        medium=medium,
        group_idx=group,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
    )


class TestRetry:
    def test_pauses_double_up_to_two_seconds(self) -> None:
        retry = Retry(lambda: 1.0)
        pauses = []
        for _ in range(7):
            retry.later(100.0)
            assert retry.at is not None
            pauses.append(retry.at - 100.0)
        assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])

    def test_followers_that_fail_together_come_back_at_different_times(self) -> None:
        for jitter, share in ((0.0, 0.5), (0.5, 0.75), (1.0, 1.0)):
            retry = Retry(lambda jitter=jitter: jitter)  # type: ignore[misc]
            retry.later(7.0)
            assert retry.at == pytest.approx(7.0 + 0.1 * share)

    @pytest.mark.parametrize(("calm", "pause"), [(60.0, 0.4), (60.5, 0.1)])
    def test_after_a_minute_without_a_failure_the_next_is_the_first(self, calm: float, pause: float) -> None:
        retry = Retry(lambda: 1.0)
        retry.later(0.0)
        retry.later(1.0)
        retry.later(1.0 + calm)
        assert retry.at == pytest.approx(1.0 + calm + pause)


class TestLiveBuffer:
    def test_frames_are_taken_once_by_their_number(self) -> None:
        buffer = LiveBuffer()
        assert buffer.first is None
        assert buffer.put(0, b"a") and buffer.put(3, b"b")
        assert buffer.first == 0 and buffer.take(1) is None
        assert (buffer.take(0), buffer.take(0), buffer.first) == (b"a", None, 3)

    def test_numbers_that_do_not_grow_are_of_another_log(self) -> None:
        buffer = LiveBuffer()
        assert buffer.put(5, b"a")
        assert not buffer.put(5, b"b") and not buffer.put(4, b"c")
        assert buffer.take(5) == b"a" and not buffer.put(5, b"a")
        buffer.clear()
        assert buffer.put(0, b"d")

    def test_the_oldest_frames_go_where_there_are_too_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(messages, "BUFFERED_FRAMES", 2)
        buffer = LiveBuffer()
        for sequence in range(3):
            assert buffer.put(sequence, b"")
            assert buffer.first == max(0, sequence - 1)

    def test_the_oldest_frames_go_where_they_are_too_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(messages, "BUFFERED_BYTES", 10)
        buffer = LiveBuffer()
        buffer.put(0, b"12345")
        buffer.put(1, b"12345")
        assert buffer.first == 0
        buffer.put(2, b"1")
        assert buffer.first == 1
        buffer.take(1)
        buffer.put(3, b"123456789")
        assert buffer.first == 2, "what was taken counts no more"
        buffer.clear()
        buffer.put(0, b"1234567890")
        assert buffer.first == 0, "nor what was forgotten"

    def test_what_lies_before_a_number_is_forgotten(self) -> None:
        buffer = LiveBuffer()
        for sequence in (2, 4, 6):
            buffer.put(sequence, b"")
        buffer.forget_before(4)
        assert buffer.first == 4
        buffer.forget_before(9)
        assert buffer.first is None


class TestContents:
    def test_it_holds_the_blocks_of_full_attention_and_the_digest_counts_the_others(self) -> None:
        contents = CacheContents(BlockIndex())
        contents.apply([stored(1, 2), stored(7, group=1, page_tokens=0)])
        assert (contents.blocks.counts(), contents.page_tokens) == ({"GPU": 2}, 16)
        with_others = contents.digest()
        contents.apply([BlockRemoved(block_hashes=[7], medium="GPU", group_idx=1)])
        assert contents.digest() != with_others
        contents.apply([stored(7, group=1)])
        assert contents.digest() == with_others

    def test_a_block_of_another_group_is_there_until_each_copy_is_removed(self) -> None:
        contents = CacheContents(BlockIndex())
        before = contents.digest()
        removed = BlockRemoved(block_hashes=[7, 8], medium="GPU", group_idx=1)
        contents.apply([stored(7, 7, 7, group=1)])
        contents.apply([removed])
        contents.apply([removed])
        assert contents.digest() != before
        contents.apply([removed])
        assert contents.digest() == before

    def test_a_cleared_cache_is_known_whole_and_has_nothing_of_any_group(self) -> None:
        contents = CacheContents(BlockIndex(), whole=False)
        before = contents.digest()
        contents.apply([stored(1), stored(7, group=1)])
        assert not contents.whole
        contents.apply([AllBlocksCleared()])
        assert (contents.whole, len(contents.blocks), contents.digest()) == (True, 0, before)
        contents.apply([BlockRemoved(block_hashes=[7], medium="GPU", group_idx=1)])
        assert contents.digest() == before

    def test_the_same_blocks_come_again_after_it_was_cleared(self) -> None:
        contents, fresh = CacheContents(BlockIndex()), CacheContents(BlockIndex())
        again = [stored(1), stored(7, group=1)]
        assert contents.next_sequence == contents.page_tokens == 0
        contents.apply([*again, AllBlocksCleared(), *again])
        fresh.apply(again)
        assert contents.digest() == fresh.digest()

    def test_a_page_has_a_token_at_least(self) -> None:
        contents = CacheContents(BlockIndex())
        contents.apply([stored(1, page_tokens=1), stored(2, page_tokens=0)])
        assert contents.page_tokens == 1

    def test_a_place_that_emptied_takes_nothing(self) -> None:
        """An engine may name as many as it likes, one after the other."""
        contents = CacheContents(BlockIndex())
        for medium, group in (("GPU", None), ("GPU", 1), ("NEW", None)):
            contents.apply([stored(7, medium=medium, group=group), BlockRemoved([7], medium, group)])
            assert not contents._others and not contents.blocks._media

    def test_a_group_that_emptied_takes_nothing_from_another(self) -> None:
        contents = CacheContents(BlockIndex())
        contents.apply([stored(1), stored(7, group=1), BlockRemoved([7], "GPU", 1)])
        assert contents.blocks.counts() == {"GPU": 1}

    def test_the_last_64_checkpoints_are_kept(self) -> None:
        contents = CacheContents(BlockIndex())
        for checkpoint in range(1, 65):
            contents.advance(checkpoint * CHECKPOINT_BATCHES)
        contents.advance(64 * CHECKPOINT_BATCHES + 1)
        first, second = CHECKPOINT_BATCHES, 2 * CHECKPOINT_BATCHES
        assert contents.digest_at(first) == StateDigest(first)
        contents.advance(65 * CHECKPOINT_BATCHES)
        assert (contents.digest_at(first), contents.digest_at(second)) == (None, StateDigest(second))

    def test_a_moment_before_it_was_known_whole_is_none_to_compare_with(self) -> None:
        contents = CacheContents(BlockIndex(), whole=False)
        contents.advance(CHECKPOINT_BATCHES)
        contents.advance(CHECKPOINT_BATCHES + 1)
        assert contents.digest_at(CHECKPOINT_BATCHES) is None


class TestSlices:
    def test_a_part_of_a_snapshot_is_folded_in_steps_between_which_others_are_answered(self) -> None:
        events = [stored(*range(at, at + 256)) for at in range(0, 10 * SLICE_BLOCKS, 256)]
        table = SourceTable()
        core = FollowerCore(table.index, lambda payload: events)
        follow(table, "B", 0, stored(1, 2))
        core.start()
        core.begun(1, "log", 1, 0, 0.0)
        steps = core.snapshot_slices(1, 0, 1, [b"all"], 0.0)
        answers = [len(table.score(Question({0: [1]}), Wanted(), 0.0)) for _ in steps]
        assert answers == [1] * 11
        core.snapshot_complete(1, None, 0.0)
        assert core.contents is not None and core.contents.blocks.counts() == {"GPU": 10 * SLICE_BLOCKS}

    def test_a_watch_that_ends_between_two_steps_takes_the_rest_with_it(self) -> None:
        table = SourceTable()
        core = FollowerCore(table.index, lambda payload: [stored(*range(2 * SLICE_BLOCKS)), stored(-1)])
        core.start()
        core.begun(1, "log", 1, 0, 0.0)
        steps = core.snapshot_slices(1, 0, 1, [b"all"], 0.0)
        next(steps)
        core.ended(1, None, 0.0)
        assert list(steps) == [] and core.contents is None
        core.tick(10.0)
        core.begun(2, "log", 1, 0, 10.0)
        core.snapshot(2, 0, 1, [b"all"], 10.0)
        core.snapshot_complete(2, None, 10.0)
        assert core.contents is not None and core.contents.blocks.counts() == {"GPU": 2 * SLICE_BLOCKS + 1}


class TestSources:
    def test_who_holds_most_blocks_comes_first_and_of_equals_who_has_more_on_the_device(self) -> None:
        table = SourceTable()
        follow(table, "A", 0, stored(1))
        follow(table, "B", 0, stored(1, 2, 3, medium="CPU"))
        follow(table, "B", 1, stored(1, 2), stored(3, medium="DISK"))
        follow(table, "C", 0, stored(2, 3))
        asked = Question({0: [1, 2, 3]})
        found = [
            (at.engine, at.dp, at.device_blocks, at.host_blocks, at.blocks) for at in table.score(asked, Wanted(), 0.0)
        ]
        assert found == [("B", 1, 2, 2, 3), ("B", 0, 0, 3, 3), ("A", 0, 1, 1, 1)]
        assert [(at.engine, at.dp) for at in table.score(asked, Wanted(most=1), 0.0)] == [("B", 1)]
        assert [at.engine for at in table.score(asked, Wanted({"A", "C"}), 0.0)] == ["A"]
        table.remove("B", 1)
        table.remove("B", 7)
        assert [(at.engine, at.dp) for at in table.score(asked, Wanted(), 0.0)] == [("B", 0), ("A", 0)]

    def test_the_best_match_is_never_another_model_s_engine(self) -> None:
        table, asked = SourceTable(), [1, 2, 3]
        follow(table, "A", 0, stored(1), model="a")
        follow(table, "B", 0, stored(1, 2, 3), model="b")
        follow(table, "C", 0, stored(1, 2), model="")
        assert [at.engine for at in table.score(Question({0: asked}, "a"), Wanted(), 0.0)] == ["A"]
        assert table.score(Question({0: asked}, "c"), Wanted(), 0.0) == []
        with pytest.raises(InvalidRequest, match="model: must be the model's name: these caches are of a or b"):
            table.score(Question({0: asked}), Wanted(), 0.0)
        with pytest.raises(InvalidRequest, match=r"^INVALID_REQUEST: prompts\[7\]\.model: must be the model's name"):
            table.holdings(Question({0: asked}, field="prompts[7].model"), Wanted(), 0.0)
        assert [at.engine for at in table.score(Question({0: asked}), Wanted({"A", "C"}), 0.0)] == ["C", "A"]

    def test_labels_leave_out_caches_whose_rank_lacks_one(self) -> None:
        table, asked = SourceTable(), Question({0: [1]})
        follow(table, "A", 0, stored(1), model="a", labels={"zone": "x", "rack": "1"})
        follow(table, "B", 0, stored(1), model="b", labels={"zone": "y"})
        follow(table, "C", 0, stored(1, page_tokens=64), model="b", labels={"zone": "x"})

        def holders(**labels: str) -> list[str]:
            question = asked._replace(labels=frozenset(labels.items()), model="" if "rack" in labels else "b")
            return [at.engine for at in table.score(question, Wanted(), 0.0)]

        assert (holders(zone="x"), holders(zone="y"), holders(zone="z")) == (["C"], ["B"], [])
        # Those that are asked are of one model then.
        assert holders(zone="x", rack="1") == ["A"]
        assert table.page_sizes(Wanted(), "b", labels=frozenset({("zone", "x")})) == {64}
        assert [at.engine for at in table.holdings(asked._replace(model="b"), Wanted(), 0.0)] == ["B", "C"]
        assert [source.labels for source in table.sources(0.0)][1] == {("zone", "y")}

    def test_engines_of_different_page_sizes_answer_one_question(self) -> None:
        table = SourceTable()
        follow(table, "A", 0, stored(1, 2, page_tokens=16))
        follow(table, "B", 0, stored(7, page_tokens=64))
        follow(table, "C", 0, stored(1, 2, page_tokens=32))
        assert table.page_sizes(Wanted()) == {16, 32, 64}
        asked = Question({16: [1, 2, 3, 4], 64: [7]})
        found = [(at.engine, at.blocks, at.page_tokens) for at in table.score(asked, Wanted(), 0.0)]
        assert found == [("B", 1, 64), ("A", 2, 16)]  # by tokens

    def test_hashes_in_finer_steps_than_blocks_are_those_of_the_blocks_ends(self) -> None:
        table = SourceTable()
        follow(table, "A", 0, stored(2, 4, page_tokens=32))
        follow(table, "B", 0, stored(1, 2, 3, page_tokens=16))
        found = table.score(Question({0: [1, 2, 3, 4, 5]}, step=16), Wanted(), 0.0)
        assert [(at.engine, at.blocks) for at in found] == [("A", 2), ("B", 3)]

    def test_a_chain_of_a_cache_s_own_is_in_its_blocks_whatever_step_the_others_have(self) -> None:
        """The groups of the cache read it in steps of the other chain, beyond its end: IndexError."""
        table = SourceTable()
        follow(table, "A", 0, stored(7, 8, page_tokens=32), stored(8, group=1, kind="mamba", page_tokens=32))
        follow(table, "B", 0, stored(2, 4, page_tokens=32))
        follow(table, "C", 0, stored(1, 2, page_tokens=16), stored(2, group=1, kind="mamba"))
        asked = Question({0: [1, 2, 3, 4], 32: [7, 8]}, step=16)
        found = [(at.engine, at.blocks) for at in table.score(asked, Wanted(), 0.0)]
        assert found == [("A", 2), ("C", 2)], "B has blocks of another chain"
        has = {at.engine: at.match.storage for at in table.holdings(asked, Wanted(), 0.0)}
        assert has == {"A": 2, "B": 0, "C": 2}

    def test_what_was_not_exact_for_too_long_is_left_out(self) -> None:
        table = SourceTable()
        core = follow(table, "A", 0, stored(1), now=10.0)
        asked = Question({0: [1]})
        assert table.score(asked, Wanted(max_staleness=1.0), 11.0)
        assert not table.score(asked, Wanted(max_staleness=1.0), 11.5)
        core.heartbeat(1, 5, None, 12.0)  # it lags: last exact at 10
        assert core.exact_at == 10.0 and not table.score(asked, Wanted(max_staleness=1.5), 12.0)
        core.ended(1, None, 12.5)
        assert core.exact_at == 10.0 and table.score(asked, Wanted(max_staleness=3.0), 12.5)
        assert table.score(asked, Wanted(freshness=False), 12.5)[0].freshness is None

    def test_nobody_is_sent_to_a_cache_that_does_not_answer(self) -> None:
        table, asked = SourceTable(), Question({0: [1]})
        core = follow(table, "A", 0, stored(1))
        follow(table, "B", 0, stored(1))
        core.ended(1, None, 5.0)
        assert [at.engine for at in table.holdings(asked, Wanted(), 5.0)] == ["B"]
        assert len(table.score(asked, Wanted(), 5.0)) == 2, "it may be back in a moment, and its state is told"

    def test_a_window_that_is_gone_makes_a_prefix_useless_and_a_state_ends_it(self) -> None:
        table = SourceTable()
        follow(table, "A", 0, stored(1, 2, 3, 4), stored(2, 3, group=1, kind="sliding_window", window=33))
        follow(table, "B", 0, stored(1, 2, 3, 4), stored(2, group=1, kind="mamba"))
        follow(table, "C", 0, stored(1, 2, 3, 4), stored(1, 2, group=1, medium="CPU", kind="full_attention"))
        found = table.score(Question({0: [1, 2, 3, 4]}), Wanted(), 0.0)
        assert [(at.engine, at.device_blocks, at.blocks) for at in found] == [("A", 3, 3), ("B", 2, 2), ("C", 0, 2)]

    def test_each_source_says_how_fresh_it_is(self) -> None:
        table = SourceTable()
        core = follow(table, "B", 1, stored(1, 2), stored(3, medium="DISK"), now=10.0)
        core.heartbeat(1, 5, None, 11.0)
        never = FollowerCore(table.index, lambda _: ())
        table.add("A", 0, never, "a:1", live=True)
        first, second = table.sources(14.0)
        assert (first.engine, first.dp, first.address, first.live, first.blocks) == ("A", 0, "a:1", True, {})
        assert (first.page_tokens, first.last_error, first.freshness.whole) == (0, "", False)
        assert (first.freshness.idle_time, first.freshness.state) == (None, FollowerState.CONNECTING)
        assert (first.freshness.next_sequence, first.freshness.lag) == (0, 0)
        assert (second.blocks, second.page_tokens, second.live) == ({"DISK": 1, "GPU": 2}, 16, False)
        fresh = second.freshness
        assert (fresh.state, fresh.log_id, fresh.whole) == (FollowerState.CATCHING_UP, "log", True)
        assert (fresh.next_sequence, fresh.lag, fresh.idle_time) == (2, 3, pytest.approx(3.0))
        core.known_next = 2
        assert table.sources(14.0)[1].freshness.lag == 0
        assert table.sources(9.0)[1].freshness.idle_time == 0.0


def follow(
    table: SourceTable,
    engine: str,
    dp: int,
    *events: object,
    now: float = 0.0,
    model: str = "",
    labels: dict[str, str] | None = None,
) -> FollowerCore:
    """A follower that has read a snapshot of these events, one a batch, in a Watch that goes on with the log."""
    core = FollowerCore(table.index, lambda payload: [events[payload[0]]])
    having = frozenset((labels or {}).items())
    table.add(engine, dp, core, f"{engine}:{dp}", live=False, model=model, labels=having)
    core.start()
    core.begun(1, "log", len(events), 0, now)
    core.snapshot(1, 0, len(events), [bytes([number]) for number in range(len(events))], now)
    core.snapshot_complete(1, None, now)
    return core


def test_events_that_nobody_here_knows_are_counted_and_cost_no_other_event() -> None:
    core = FollowerCore(BlockIndex(), lambda payload: decode_batch(payload).events)
    core.start()
    (opened,) = core.take_commands()
    assert isinstance(opened, OpenWatch)
    core.begun(opened.number, "log", 2, 0, 0.0)
    moved = msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}, {"type": "BlockRemoved", "block_hashes": [1]}], 0])
    kept = msgspec.msgpack.encode([1.0, [["BlockStored", [7], None, [], 16], ["BlockMoved"]], 0])
    core.snapshot(opened.number, 0, 1, [moved], 0.0)
    core.snapshot_complete(opened.number, None, 0.0)
    core.batches(opened.number, 1, [kept], 0.0)
    assert core.counts.unknown == 2 and core.counts.undecodable == 0
    assert core.contents is not None and core.contents.blocks.counts() == {"GPU": 1}
