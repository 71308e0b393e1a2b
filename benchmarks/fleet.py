"""What pulls are worth to a fleet: real requests over eight engines. ``python -m benchmarks.fleet``.

Simulated are the engines (one queue each, a host cache of fixed size) and the network; what decides is the planner and
the index that routers use. ``TEST_TRACE`` names the whole trace (docs/lab/registry.md has its figures), else the
committed sample is taken. ``--speed``, ``--rate``, ``--host-blocks``, ``--busier`` change the fleet.
"""

from __future__ import annotations

import argparse
import statistics
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvgrpc.events.following.index import BlockIndex, BlockSet, Match
from kvgrpc.events.following.planning import PULL_OVERHEAD_SECONDS, Placement, Planner, PlanQuestion
from kvgrpc.events.following.sources import Holding, Question, Wanted
from kvgrpc.events.log.digest import mix
from kvgrpc.model import EngineLoad
from tests.support.prefix_cache import BLOCK_TOKENS, timed_requests

ENGINES = 8
# Llama 3 8B in bfloat16: 32 layers, 8 heads of 128, K and V.
TOKEN_BYTES = 131_072
_MEDIUM = "CPU_PINNED"
# Ranks say what they have to do so often.
_TOLD_EACH_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """``speed``: tokens of prefill in a second; ``rate``: bytes in a second between two engines; ``host_blocks``: of
    512 tokens, of each engine; ``busier``: the trace runs so many times as fast."""

    speed: float = 8_000.0
    rate: float = 4e9
    host_blocks: int = 2_000
    busier: float = 1.0


@dataclass(eq=False, slots=True)
class Engine:
    """One queue of prompts, and a host cache of which the least recently used leaf goes first."""

    name: str
    blocks: BlockSet
    capacity: int
    free_at: float = 0.0
    kept: OrderedDict[int, None] = field(default_factory=OrderedDict)
    lends_until: list[float] = field(default_factory=list)
    load: EngineLoad = field(default_factory=EngineLoad)

    def keep(self, prompt: Sequence[int]) -> None:
        """All of a prompt is in its cache now."""
        new = [block for block in prompt if block not in self.kept]
        self.blocks.stored(_MEDIUM, new)
        # From its end, so that the end is the first to go.
        for block in reversed(prompt):
            self.kept[block] = None
            self.kept.move_to_end(block)
        gone = [self.kept.popitem(last=False)[0] for _ in range(max(0, len(self.kept) - self.capacity))]
        self.blocks.removed(_MEDIUM, gone)

    def say(self, now: float, setup: Setup) -> None:
        """What it has to do, as its rank tells readers of its events."""
        self.lends_until = [end for end in self.lends_until if end > now]
        self.load = EngineLoad(
            prefill_tokens_per_second=setup.speed,
            waiting_tokens=int(max(0.0, self.free_at - now) * setup.speed),
            page_tokens=BLOCK_TOKENS,
            page_bytes=BLOCK_TOKENS * TOKEN_BYTES,
            lent_pulls=len(self.lends_until),
            pull_rates=tuple((f"e{number}", setup.rate) for number in range(ENGINES)),
        )


class Fleet:
    """Eight engines and the index over their caches. ``holdings`` is what a planner asks."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.index = BlockIndex()
        self.engines = {
            f"e{number}": Engine(f"e{number}", self.index.cache(), setup.host_blocks) for number in range(ENGINES)
        }
        for engine in self.engines.values():
            engine.blocks.show()
        self._told_at = -_TOLD_EACH_SECONDS

    def holdings(self, question: Question, wanted: Wanted, now: float) -> list[Holding]:
        hashes = question.chains[0]
        on_host = self.index.on_host(hashes, [engine.blocks for engine in self.engines.values()])
        return [
            Holding(
                engine.name, 0, Match(0, *[on_host[engine.blocks]] * 3), on_host[engine.blocks], BLOCK_TOKENS,
                len(hashes), engine.load,
            )
            for engine in self.engines.values()
        ]  # fmt: skip

    def tell(self, now: float) -> None:
        """Each second every rank says what it has to do."""
        if now - self._told_at >= _TOLD_EACH_SECONDS:
            self._told_at = now
            for engine in self.engines.values():
                engine.say(now, self.setup)

    def run(self, place: Placement, prompt: Sequence[int], now: float, result: Result) -> None:
        """What becomes of a request there, as it turns out and not as it was estimated."""
        engine, setup, here = self.engines[place.engine], self.setup, place.match.storage
        ready = now
        if place.pull is not None:
            source = self.engines[place.pull.engine]
            source.lends_until = [end for end in source.lends_until if end > now]
            nbytes = place.pull.blocks * BLOCK_TOKENS * TOKEN_BYTES
            ready = now + PULL_OVERHEAD_SECONDS + nbytes * (1 + len(source.lends_until)) / setup.rate
            source.lends_until.append(ready)
            here = place.pull.host_blocks
            result.moved += nbytes
        computed = (len(prompt) - here) * BLOCK_TOKENS
        engine.free_at = max(engine.free_at, ready) + computed / setup.speed
        engine.keep(prompt)
        result.computed += computed
        result.tokens += len(prompt) * BLOCK_TOKENS
        result.pulls += place.pull is not None
        result.first_token.append(engine.free_at - now)


@dataclass(slots=True)
class Result:
    """What a router made of the trace."""

    tokens: int = 0
    computed: int = 0
    moved: int = 0
    pulls: int = 0
    first_token: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        times = sorted(self.first_token)
        at = [times[min(len(times) - 1, int(len(times) * share))] for share in (0.5, 0.9, 0.99)]
        quantiles = " | ".join(f"{each:.2f}" for each in at)
        share, mean = self.computed / self.tokens, statistics.mean(times)
        return f"| {name} | {share:.1%} | {mean:.2f} | {quantiles} | {self.pulls:,} | {self.moved / 1e12:.2f} |"


class Router:
    """``turn``: each engine in turn; ``longest``: the engine that has half of the prompt or more, else the one with the
    shortest queue; ``plan``: as the planner says. ``pull`` behind it: with pulls, which the planner decides on."""

    def __init__(self, name: str, fleet: Fleet) -> None:
        self._name, self._fleet = name, fleet
        self._planner = Planner(fleet)
        self._turn = 0

    def place(self, prompt: Sequence[int], now: float) -> Placement:
        pulls = self._name.endswith("pull")
        named: list[str] = []
        if self._name.startswith("turn"):
            named, self._turn = [f"e{self._turn % ENGINES}"], self._turn + 1
        elif self._name.startswith("longest"):
            held = self._fleet.holdings(Question({0: prompt}), Wanted(), now)
            most = max(held, key=lambda each: each.lendable)
            idle = min(self._fleet.engines.values(), key=lambda each: each.free_at)
            named = [most.engine if 2 * most.lendable >= len(prompt) else idle.name]
        question = PlanQuestion(Question({0: prompt}), engines=named, sources=() if pulls else ("none",))
        ((best, *_),) = self._planner.plan([question], now, wanted=Wanted(), reserve=True)
        return best


def simulate(router: str, setup: Setup, limit: int | None = None) -> Result:
    """The trace over a fleet of empty caches."""
    fleet, result = Fleet(setup), Result()
    chosen = Router(router, fleet)
    for second, blocks in timed_requests(limit):
        now = second / setup.busier
        fleet.tell(now)
        prompt = [mix(block) for block in blocks]
        fleet.run(chosen.place(prompt, now), prompt, now, result)
    return result


ROUTERS = ("turn", "turn, pull", "longest", "plan", "plan, pull")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.fleet", description=__doc__)
    for name, default in (("speed", 8_000.0), ("rate", 4e9), ("host-blocks", 2_000), ("busier", 1.0)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    setup = replace(Setup(), **vars(parser.parse_args()))
    print(f"{ENGINES} engines, {setup}")
    print("| router | prompt tokens computed | first token, mean s | p50 | p90 | p99 | pulls | TB moved |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for router in ROUTERS:
        print(simulate(router, setup).row(router), flush=True)


if __name__ == "__main__":
    main()
