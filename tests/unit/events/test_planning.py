"""A plan compares times to the first token: queues, blocks that are here, pages to pull, and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.events.following.index import BlockIndex, Match
from kvgrpc.events.following.planning import (
    PULL_OVERHEAD_SECONDS,
    RESERVED_SECONDS,
    Placement,
    Planner,
    PlanQuestion,
)
from kvgrpc.events.following.sources import Holding, Question, Wanted
from kvgrpc.model import EngineLoad

# 16 tokens a page, 1 MB a page, 1,000 tokens a second: a page costs 16 ms to compute, 1 ms to pull at 1 GB/s.
LOAD = EngineLoad(prefill_tokens_per_second=1000.0, page_tokens=16, page_bytes=1_000_000)
PROMPT = PlanQuestion(Question({0: range(100)}))
ANY = Wanted()


@dataclass
class Caches:
    """A table that holds what the test says."""

    held: Sequence[Holding]

    def holdings(self, question: Question, wanted: Wanted, now: float) -> Sequence[Holding]:
        return self.held


def holding(engine: str, here: int = 0, *, lendable: int | None = None, load: EngineLoad | None = LOAD) -> Holding:
    on_host = here if lendable is None else lendable
    return Holding(engine, 0, Match(0, here, here, here), on_host, 16, 100, load)


def placed(*held: Holding, asked: PlanQuestion = PROMPT) -> list[Placement]:
    table: Any = Caches(held)
    (found,) = Planner(table).plan([asked], 0.0, wanted=ANY)
    return found


def test_an_idle_engine_that_has_the_prompt_gets_it() -> None:
    best, other = placed(holding("empty"), holding("warm", 90))
    assert (best.engine, best.pull, best.compute_tokens) == ("warm", None, 160)
    assert best.first_token == pytest.approx(0.16)
    assert other.pull is not None and other.pull.engine == "warm"


def test_a_prompt_has_its_own_tokens_whatever_the_pages_of_a_cache() -> None:
    """1,600 tokens hashed by 16 are 100 hashes: a cache with pages of 64 had 6,400 tokens to compute."""
    asked = PROMPT._replace(tokens=1600)
    large = holding("large")._replace(page_tokens=64)
    assert [each.compute_tokens for each in placed(large, asked=asked)] == [1600]
    assert [each.compute_tokens for each in placed(holding("small", 90), large, asked=asked)] == [160, 1600]


def test_no_less_than_nothing_is_left_to_compute() -> None:
    """Who asks says 77 tokens, and hashes of 1,600."""
    busy = replace(LOAD, waiting_tokens=10_000)
    found = placed(holding("busy", 90, load=busy), holding("half", 3), asked=PROMPT._replace(tokens=77))
    assert [(each.engine, each.compute_tokens) for each in found] == [("half", 29), ("busy", 0)]
    pulling = placed(
        holding("busy", 90, load=busy),
        holding("far", load=replace(LOAD, prefill_tokens_per_second=1.0)),
        asked=PROMPT._replace(tokens=77),
    )[0]
    assert pulling.pull is not None and (pulling.compute_tokens, pulling.compute) == (0, 0.0)


def test_a_busy_engine_lends_to_an_idle_one() -> None:
    busy = replace(LOAD, waiting_tokens=10_000)
    best, _ = placed(holding("busy", 90, load=busy), holding("idle"))
    assert best.engine == "idle" and best.pull is not None
    assert (best.pull.engine, best.pull.blocks, best.pull.nbytes) == ("busy", 90, 90_000_000)
    assert best.first_token == pytest.approx(PULL_OVERHEAD_SECONDS + 0.09 + 0.16)
    assert best.first_token_without_pull == pytest.approx(1.6)


def test_only_what_the_taker_lacks_is_counted() -> None:
    busy = replace(LOAD, waiting_tokens=10_000)
    best, _ = placed(holding("busy", 90, load=busy), holding("half", 40))
    assert best.engine == "half" and best.pull is not None
    assert (best.pull.host_blocks, best.pull.blocks) == (90, 50)


def test_a_slow_pair_computes() -> None:
    slow = replace(LOAD, pull_rates=(("busy", 10e6),))
    busy = replace(LOAD, waiting_tokens=10_000)
    best, _ = placed(holding("busy", 90, load=busy), holding("far", load=slow))
    assert (best.engine, best.pull) == ("far", None)


def test_a_pair_that_was_measured_is_believed_and_one_that_was_not_gets_what_others_came_to() -> None:
    busy = replace(LOAD, waiting_tokens=10_000)
    near = replace(LOAD, pull_rates=(("busy", 4e9),))
    found = {
        each.engine: each for each in placed(holding("busy", 90, load=busy), holding("near", load=near), holding("new"))
    }
    near_pull, new_pull = found["near"].pull, found["new"].pull
    assert near_pull is not None and (near_pull.bytes_per_second, near_pull.measured) == (4e9, True)
    assert new_pull is not None and (new_pull.bytes_per_second, new_pull.measured) == (4e9, False)


def test_a_source_that_lends_to_many_is_slower_than_one_that_lends_to_nobody() -> None:
    lending = replace(LOAD, waiting_tokens=10_000, lent_pulls=9)
    idle = replace(LOAD, waiting_tokens=10_000)
    best = placed(holding("lending", 90, load=lending), holding("quiet", 85, load=idle), holding("taker"))[0]
    assert best.engine == "taker" and best.pull is not None and best.pull.engine == "quiet"


def test_pages_come_while_the_request_waits_for_its_turn() -> None:
    """The taker has a queue of its own, longer than the pull."""
    busy, waiting = replace(LOAD, waiting_tokens=10_000), replace(LOAD, waiting_tokens=500)
    best, _ = placed(holding("busy", 100, load=busy), holding("taker", load=waiting))
    assert best.engine == "taker" and best.first_token == pytest.approx(0.5)


@pytest.mark.parametrize(
    "other",
    [
        holding("busy", 90, lendable=0),
        holding("busy", 90, load=replace(LOAD, page_bytes=2_000_000)),
        holding("busy", 90, load=replace(LOAD, page_bytes=0, page_tokens=0)),
        holding("busy", 90, load=None),
    ],
    ids=["on its device alone", "other pages", "it lends nothing", "it says nothing"],
)
def test_what_cannot_be_lent_is_not_planned(other: Holding) -> None:
    taker = next(each for each in placed(other, holding("taker")) if each.engine == "taker")
    assert taker.pull is None


@dataclass
class OfKinds(Caches):
    """Of each cache the part that its own kind of hashes finds; by others it has nothing."""

    kinds: Sequence[str]

    def holdings(self, question: Question, wanted: Wanted, now: float) -> Sequence[Holding]:
        asked = "mine" if question.chains[0][0] == 0 else "other"
        nothing = Match(0, 0, 0, 0)
        return [
            each if kind == asked else each._replace(match=nothing, lendable=0)
            for each, kind in zip(self.held, self.kinds, strict=True)
        ]


def test_engines_of_two_kinds_are_in_one_plan() -> None:
    """Each counts by its own kind's hashes, at once the one that runs it and the one that lends."""
    busy = replace(LOAD, waiting_tokens=10_000)
    table: Any = OfKinds([holding("busy", 90, load=busy), holding("idle", 40)], ("mine", "other"))
    both = PROMPT._replace(other_kinds=(Question({0: range(100, 200)}),))
    (found,), (best, _) = (
        Planner(table).plan([asked], 0.0, wanted=ANY)[0][:n] for asked, n in ((PROMPT, 1), (both, 2))
    )
    assert found.match.storage == 0 and found.pull is not None and found.pull.blocks == 90
    assert (best.engine, best.match.storage) == ("idle", 40)
    assert best.pull is not None and (best.pull.engine, best.pull.blocks, best.pull.host_blocks) == ("busy", 50, 90)


def test_caches_that_say_what_their_pages_are_exchange_those_that_they_have_in_common() -> None:
    """Pages of another kind may be as large and as long, and of no use; of another size they may be of use."""
    busy = replace(LOAD, waiting_tokens=10_000, page_forms=(1, 2))

    def pulled(load: EngineLoad) -> tuple[int, int] | None:
        at = next(
            each
            for each in placed(holding("busy", 90, load=busy), holding("taker", load=load))
            if each.engine == "taker"
        )
        return None if at.pull is None else (at.pull.blocks, at.pull.nbytes)

    assert pulled(replace(LOAD, page_forms=(3,))) is None
    assert pulled(replace(LOAD, page_forms=(3, 2))) == (90, 90_000_000)
    assert pulled(replace(LOAD, page_forms=(1,), page_bytes=500_000)) == (90, 45_000_000), "half of the heads"
    assert pulled(LOAD) == (90, 90_000_000), "it did not say"
    assert pulled(replace(LOAD, page_forms=(2,), page_tokens=32)) is None


def test_longer_sources_that_are_of_no_use_hide_none_that_is() -> None:
    """As many as are looked at, and more, hold more of the prompt in pages of the other kind."""
    other, own = (replace(LOAD, waiting_tokens=10_000, page_forms=(form,)) for form in (1, 2))
    sources = [holding(f"other{number}", 95, load=other) for number in range(12)]
    best = placed(*sources, holding("busy", 90, load=own), holding("idle", load=replace(LOAD, page_forms=(2,))))[0]
    assert best.engine == "idle" and best.pull is not None
    assert (best.pull.engine, best.pull.blocks) == ("busy", 90)


def test_the_ranks_of_one_engine_hide_no_other_source_from_it() -> None:
    busy = replace(LOAD, waiting_tokens=10_000)
    ranks = [holding("wide", 95, load=busy)._replace(dp=dp) for dp in range(1, 13)]
    best = placed(*ranks, holding("narrow", 90, load=busy), holding("wide"))[0]
    assert (best.engine, best.dp) == ("wide", 0)
    assert best.pull is not None and best.pull.engine == "narrow"


def test_pages_of_several_blocks_are_lent_whole() -> None:
    """Both have pages of 64 tokens; one has blocks of 16 on its device, and events tell of these."""
    large = replace(LOAD, page_tokens=64, page_bytes=4_000_000)
    busy = replace(large, waiting_tokens=10_000)
    small = holding("small", 13, load=busy)
    best = placed(small, holding("large", load=large)._replace(page_tokens=64, blocks=25))[0]
    assert best.pull is not None and (best.pull.host_blocks, best.pull.blocks, best.pull.nbytes) == (3, 3, 12_000_000)
    best = placed(holding("large", 20, load=busy)._replace(page_tokens=64, blocks=25), holding("small", 6, load=large))[
        0
    ]
    assert best.pull is not None and (best.pull.host_blocks, best.pull.blocks, best.pull.nbytes) == (80, 74, 76_000_000)


def test_engines_that_were_named_alone_run_it_or_lend() -> None:
    held = (holding("a", 90), holding("b", 80), holding("c"))
    assert [each.engine for each in placed(*held, asked=PROMPT._replace(engines={"c"}))] == ["c"]
    (only,) = placed(*held, asked=PROMPT._replace(engines={"c"}, sources={"b"}))
    assert only.pull is not None and only.pull.engine == "b"


def test_an_engine_that_does_not_say_how_quickly_it_computes_is_taken_for_the_others() -> None:
    found = placed(holding("says", 10), holding("mute", 20, load=None))
    assert (found[0].engine, found[0].speed_assumed) == ("mute", True)
    assert not found[1].speed_assumed


def test_where_nobody_says_it_most_blocks_come_first_and_no_time_is_told() -> None:
    found = placed(holding("few", 10, load=None), holding("many", 20, load=None))
    assert [each.engine for each in found] == ["many", "few"]
    assert {each.first_token for each in found} == {None} and not any(each.pull for each in found)


def test_requests_of_one_call_spread() -> None:
    table: Any = Caches([holding("a", 50), holding("b", 50)])
    answers = Planner(table).plan([PROMPT] * 6, 0.0, wanted=ANY)
    chosen = [each[0].engine for each in answers]
    assert chosen.count("a") == chosen.count("b") == 3


def test_what_was_reserved_counts_in_the_next_call_until_the_engine_has_told_it() -> None:
    table: Any = Caches([holding("a", 50), holding("b", 50)])
    planner = Planner(table)

    def ask(now: float, *, reserve: bool) -> str:
        return planner.plan([PROMPT], now, wanted=ANY, reserve=reserve)[0][0].engine

    assert [ask(0.0, reserve=False) for _ in range(3)] == ["a", "a", "a"]
    assert [ask(0.0, reserve=True) for _ in range(4)] == ["a", "b", "a", "b"]
    assert ask(0.0, reserve=True) == "a" and ask(0.0, reserve=False) == "b"
    assert ask(RESERVED_SECONDS, reserve=False) == "a"


def test_a_plan_that_is_refused_or_left_leaves_nothing_reserved() -> None:
    """It counted for 1.5 s: for others those engines seemed busy with what nobody sends."""

    class Unnamed(Caches):
        """Refuses the question that names no model, as a table of several models does."""

        def holdings(self, question: Question, wanted: Wanted, now: float) -> Sequence[Holding]:
            if not question.model:
                raise InvalidRequest.of("model", "", "the model's name")
            return super().holdings(question, wanted, now)

    planner = Planner(Unnamed([holding("a", 50)]))
    named = PROMPT._replace(question=Question({0: range(100)}, "m"))

    def queue(now: float) -> float | None:
        return planner.plan([named], now, wanted=ANY)[0][0].queue

    planner.plan([named], 0.0, wanted=ANY, reserve=True)
    assert queue(0.0) == 0.8
    with pytest.raises(InvalidRequest):
        planner.plan([named, named, PROMPT], 0.0, wanted=ANY, reserve=True)
    left = planner.in_steps([named] * 3, 1.0, wanted=ANY, reserve=True)
    assert next(left) and next(left) and queue(1.0) == 2.4
    left.close()
    assert queue(1.0) == 0.8, "what others reserved stays"
    late = planner.in_steps([named] * 3, 1.0, wanted=ANY, reserve=True)
    assert next(late) and queue(1.0 + RESERVED_SECONDS) == 0.0
    late.close()
    assert queue(1.0 + RESERVED_SECONDS) == 0.0, "nothing is taken back twice"


def test_blocks_on_the_host_are_told_apart_from_those_on_the_device_alone() -> None:
    index = BlockIndex()
    both, device, gap = index.cache(), index.cache(), index.cache()
    for cache in (both, device, gap):
        cache.show()
    both.stored("GPU", [1, 2, 3])
    both.stored("CPU_PINNED", [1, 2])
    device.stored("GPU", [1, 2, 3])
    gap.stored("CPU", [1, 3])
    assert index.on_host([1, 2, 3], [both, device, gap]) == {both: 2, device: 0, gap: 1}
