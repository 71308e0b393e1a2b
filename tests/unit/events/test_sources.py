"""What an index says of the caches that it follows: page by page, and in pieces where they are many."""

from __future__ import annotations

from kvgrpc.events.following.follower import FollowerCore
from kvgrpc.events.following.messages import FollowerState
from kvgrpc.events.following.sources import SourcesPage, SourceTable

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
