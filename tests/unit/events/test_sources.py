"""What an index says of the caches that it follows: page by page, and in pieces where they are many."""

from __future__ import annotations

import gc
import random
import weakref

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.events.following.follower import FollowerCore
from kvgrpc.events.following.messages import FollowerState
from kvgrpc.events.following.sources import Question, SourcesPage, SourceTable, Wanted
from kvgrpc.events.model import BlockStored

ENGINES, DP_RANKS = 200, 5
CONNECTING = FollowerState.CONNECTING


def followed() -> SourceTable:
    table = SourceTable()
    for number in reversed(range(ENGINES)):
        for dp in range(DP_RANKS):
            table.add(f"E{number}", dp, FollowerCore(table.index, lambda _: []), "127.0.0.1:1", live=False)
    return table


def test_pages_have_each_cache_once_in_order_and_count_all() -> None:
    table, after, found = followed(), None, list[tuple[str, int]]()
    while True:
        page = SourcesPage()
        steps = list(table.page_in_steps(page, lambda: 0.0, after=after, states=(), most=64))
        assert len(steps) > 10, "others go on between"
        assert page.counts == {CONNECTING: ENGINES * DP_RANKS}
        found += [(source.engine, source.dp) for source in page.sources]
        if not page.more:
            break
        after = found[-1]
    assert found == sorted((f"E{number}", dp) for number in range(ENGINES) for dp in range(DP_RANKS))


def test_a_state_that_was_asked_for_leaves_the_counts_of_others() -> None:
    table, page = followed(), SourcesPage()
    list(table.page_in_steps(page, lambda: 0.0, after=None, states={FollowerState.CURRENT}, most=64))
    assert (page.sources, page.more, page.counts) == ([], False, {CONNECTING: ENGINES * DP_RANKS})


def test_caches_that_come_and_go_between_pieces_harm_nothing() -> None:
    table, page = followed(), SourcesPage()
    steps = table.page_in_steps(page, lambda: 0.0, after=None, states=(), most=10_000)
    next(steps)
    for dp in range(DP_RANKS):
        table.remove("E99", dp)
    list(steps)
    assert len(page.sources) == (ENGINES - 1) * DP_RANKS and not page.more


def stored(hashes: list[int], page_tokens: int, medium: str = "GPU") -> BlockStored:
    return BlockStored(block_hashes=hashes, parent_block_hash=None, token_ids=[], block_size=page_tokens, medium=medium)


def following(table: SourceTable, engine: str, *events: BlockStored, model: str = "") -> FollowerCore:
    """One more cache, whose publisher says that it holds what these events stored."""
    core = FollowerCore(table.index, lambda _: events)
    table.add(engine, 0, core, "127.0.0.1:1", live=False, model=model)
    core.start()
    core.begun(1, "log", 0, 0, 0.0)
    core.snapshot(1, 0, 0, [b"all of it"], 0.0)
    core.snapshot_complete(1, None, 0.0)
    return core


def test_a_cache_that_is_gone_is_not_kept_by_the_questions_that_found_it() -> None:
    table = SourceTable()
    cores = {engine: following(table, engine, stored([1, 2], 16)) for engine in ("E0", "E1")}
    assert len(table.score(Question({0: [1, 2]}), Wanted(), 0.0)) == 2
    gone = weakref.ref(cores["E0"].contents)
    cores.pop("E0").stop()
    table.remove("E0", 0)
    gc.collect()
    assert gone() is None
    assert len(table.score(Question({0: [1, 2]}), Wanted(), 0.0)) == 1


@pytest.mark.parametrize("seed", range(30))
def test_the_best_are_the_first_of_all(seed: int) -> None:
    rng, table = random.Random(seed), SourceTable()
    sizes = rng.choice([[16], [16, 64], [1, 16, 64]])
    for number in range(12):
        held = [(rng.choice(["GPU", "CPU", "DISK"]), rng.randrange(40)) for _ in range(2)]
        events = [stored(list(range(count)), rng.choice(sizes), medium) for medium, count in held]
        following(table, f"E{number:02}", *events, model=rng.choice(["", "m"]))
    for length in (1, 7, 40):
        question = Question({0: list(range(length))}, model=rng.choice(["", "m"]))
        engines = rng.choice([(), ("E03", "E07", "E11")])
        everybody = table.score(question, Wanted(engines), 0.0)
        assert everybody == sorted(
            everybody, key=lambda one: (-one.blocks * (one.page_tokens or 1), -one.device_blocks, one.engine)
        )
        for most in range(1, 14):
            assert table.score(question, Wanted(engines, most), 0.0) == everybody[:most]


def test_whoever_shows_the_blocks_now_is_told() -> None:
    table, question = SourceTable(), Question({0: [1, 2, 3]})
    core = following(table, "E", stored([1, 2], 16))

    def told() -> list[tuple[str, int]]:
        return [(score.engine, score.blocks) for score in table.score(question, Wanted(), 0.0)]

    assert told() == [("E", 2)]
    other = following(table, "F", stored([1], 16))
    assert told() == [("E", 2), ("F", 1)]
    table.remove("E", 0)
    assert told() == [("F", 1)], "its core is there still"
    core.stop()
    table.add("E", 0, other, "127.0.0.1:2", live=False)
    table.remove("F", 0)
    assert told() == [("E", 1)]
    other.stop()
    assert told() == []


def test_a_question_without_a_model_is_refused_while_the_caches_that_it_asks_are_of_several() -> None:
    table, question = SourceTable(), Question({0: [1]})
    for engine, model in (("E", "m"), ("F", "n"), ("G", "")):
        following(table, engine, stored([1], 16), model=model)

    def told(question: Question, wanted: Wanted) -> list[str]:
        return [score.engine for score in table.score(question, wanted, 0.0)]

    with pytest.raises(InvalidRequest):
        told(question, Wanted())
    assert told(question, Wanted(("E", "G"))) == ["E", "G"]
    assert told(question._replace(model="n"), Wanted()) == ["F"]
    following(table, "F", stored([1], 16), model="m")
    assert told(question, Wanted()) == ["E", "F", "G"]
    following(table, "F", stored([1], 16), model="n")
    table.remove("E", 0)
    assert told(question, Wanted()) == ["F", "G"]
