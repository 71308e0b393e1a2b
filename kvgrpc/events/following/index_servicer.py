"""IndexService: checks what was asked, asks the index, puts the answer into messages."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, Protocol

from kvgrpc.errors import InvalidRequest, ServerDraining
from kvgrpc.events.following.index import tier_of
from kvgrpc.events.following.messages import FollowerState
from kvgrpc.events.following.planned import fill_placement
from kvgrpc.events.following.planning import Placement, PlanQuestion
from kvgrpc.events.following.questions import (
    Asked,
    Budget,
    asked_from_pb,
    labels_from_pb,
    wanted_from_pb,
    wanted_of_plan,
)
from kvgrpc.events.following.sources import (
    NO_LABELS,
    CacheScore,
    Freshness,
    LabelSet,
    Question,
    Source,
    SourcesPage,
    Wanted,
)
from kvgrpc.observability import metrics
from kvgrpc.paging import not_ours, page_size, page_token, read_page_token
from kvgrpc.rpc.blocking import BlockingCalls
from kvgrpc.rpc.turns import PIECE_SECONDS, in_pieces, next_turn
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1.index_service_pb2_grpc import IndexServiceServicer

MAX_NOT_FOLLOWED = 100
# Up to 5 ms of SHA-256 in blocks of 16 tokens or more, 20 to 70 in blocks of one, of which a turn of the loop has its
# share; longer prompts and blocks are hashed on threads, so many of them at once.
ON_THE_LOOP_TOKENS, _ON_THE_LOOP_BLOCK = 16_384, 1_024
_FILLED_OF_A_STEP = 64
MAX_LARGE = 16
_LIST = "ListSources"
_PROMPTS, _MISSES = metrics.INDEX_PROMPTS, metrics.INDEX_MISSES
_STATES = {state: pb.IndexSourceState.Value(f"INDEX_SOURCE_STATE_{state.name}") for state in FollowerState}


class Scores(Protocol):
    """An index that answers; ``kvgrpc.client.PrefixIndex`` is one."""

    def ask(self, question: Question, wanted: Wanted) -> list[CacheScore]: ...
    def page_sizes(
        self, wanted: Wanted, model: str = "", field: str = "model", labels: LabelSet = NO_LABELS
    ) -> set[int]: ...
    def plan_in_steps(
        self, questions: Sequence[PlanQuestion], wanted: Wanted, *, reserve: bool = False
    ) -> Generator[list[Placement] | None, None, None]: ...
    def page_in_steps(
        self, page: SourcesPage, *, after: tuple[str, int] | None, states: Collection[FollowerState], most: int
    ) -> Iterator[None]: ...
    def not_followed(self) -> list[str]: ...


class IndexServicer(IndexServiceServicer):
    """Belongs to the event loop of the index."""

    def __init__(self, index: Scores) -> None:
        self._index = index
        self._draining = False
        self._large = BlockingCalls("index-hash", "scores of long prompts", threads=2, most=MAX_LARGE)

    def drain(self) -> None:
        """Answers SERVER_DRAINING from now on."""
        self._draining = True

    def undrain(self) -> None:
        """Answers again."""
        self._draining = False

    def close(self) -> None:
        """Lets go of its threads."""
        self._large.close()

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        self._check_open()
        wanted, budget, began = wanted_from_pb(request), Budget(), time.monotonic()
        response = pb.ScoreResponse()
        for index, prompt in enumerate(request.prompts):
            field = f"prompts[{index}]"
            question, _ = await self._question(prompt, field, wanted, budget)
            scores = self._index.ask(question, wanted)
            _PROMPTS.inc()
            if not scores:
                _MISSES.inc()
            budget.take_answers("max_scores", request.max_scores, len(scores))
            _fill_scores(response.prompts.add(), scores, _blocks(question, prompt))
            if time.monotonic() - began > PIECE_SECONDS:
                await next_turn()
                began = time.monotonic()
        return response

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        self._check_open()
        wanted, budget, began = wanted_of_plan(request), Budget(), time.monotonic()
        questions = []
        for index, each in enumerate(request.prompts):
            field = f"prompts[{index}].prompt"
            question, tokens = await self._question(each.prompt, field, wanted, budget)
            others = list[Question]()
            for at, prompt in enumerate(each.other_kinds):
                where = f"prompts[{index}].other_kinds[{at}]"
                other, more = await self._question(prompt, where, wanted, budget, each.prompt)
                others.append(other)
                tokens = tokens or more
            named = frozenset(each.engines), frozenset(each.sources)
            questions.append(PlanQuestion(question, each.tokens or tokens, *named, others))
            if time.monotonic() - began > PIECE_SECONDS:
                await next_turn()
                began = time.monotonic()
        response = pb.PlanResponse()
        # Closed where the answer is refused or nobody waits for it any more: nothing stays reserved for it.
        with closing(self._index.plan_in_steps(questions, wanted, reserve=request.reserve)) as steps:
            await in_pieces(_filled(response, request, questions, steps, budget))
        return response

    async def ListSources(self, request: pb.ListSourcesRequest, context: Any) -> pb.ListSourcesResponse:
        self._check_open()
        after, page = _read_place(request.page_token), SourcesPage()
        states, most = _states(request.states), page_size(request.page_size)
        await in_pieces(self._index.page_in_steps(page, after=after, states=states, most=most))
        counts = sorted((_STATES[state], count) for state, count in page.counts.items())
        return pb.ListSourcesResponse(
            sources=map(_source_to_pb, page.sources),
            next_page_token=page_token(_LIST, _place(page.sources[-1])) if page.more else "",
            counts=[pb.IndexSourceStateCount(state=state, sources=count) for state, count in counts],
            not_followed=self._index.not_followed()[:MAX_NOT_FOLLOWED],
        )

    async def _question(
        self,
        prompt: pb.ScorePrompt,
        field: str,
        wanted: Wanted,
        budget: Budget,
        first: pb.ScorePrompt | None = None,
    ) -> tuple[Question, int]:
        """Returns also the tokens of the prompt, where it came as tokens. ``first``: what names model and labels, where
        this is the same prompt for engines of another kind."""
        model = (first or prompt).model
        labels, sizes = labels_from_pb(first or prompt, field), set[int]()
        if _leaves_sizes_open(prompt):
            sizes = self._index.page_sizes(wanted, model, f"{field}.model", labels)
        asked = asked_from_pb(prompt, field, sizes, budget)
        chains = {0: asked.given} if asked.given is not None else await self._hashed(asked)
        return Question(chains, model, asked.step, f"{field}.model", labels), asked.tokens

    async def _hashed(self, asked: Asked) -> dict[int, list[int]]:
        # A million tokens take seconds, which are not the other callers'.
        if asked.hashed_tokens > ON_THE_LOOP_TOKENS or min(asked.largest_block, asked.tokens) > _ON_THE_LOOP_BLOCK:
            return await self._large.run(lambda: _all_hashes(asked))
        found: dict[int, list[int]] = {size: [] for size in asked.chains}
        for size, hashes in asked.chains.items():
            while not _hash_some(hashes, found[size]):
                await next_turn()
        return found

    def _check_open(self) -> None:
        if self._draining:
            raise ServerDraining("this index stops: ask another one")


def _states(asked: Sequence[int]) -> frozenset[FollowerState]:
    known = {number: state for state, number in _STATES.items()}
    for index, state in enumerate(asked):
        if state not in known:
            names = ", ".join(map(pb.IndexSourceState.Name, sorted(known)))
            raise InvalidRequest.of(f"states[{index}]", state, f"one of {names}")
    return frozenset(known[pb.IndexSourceState.ValueType(state)] for state in asked)


def _place(source: Source) -> str:
    return f"{source.engine}\0{source.dp}"


def _read_place(token: str) -> tuple[str, int] | None:
    engine, _, dp = read_page_token(_LIST, token).rpartition("\0")
    if not dp:
        return None
    if not dp.isdecimal():
        raise not_ours(token)
    return engine, int(dp)


def _leaves_sizes_open(prompt: pb.ScorePrompt) -> bool:
    kind = prompt.WhichOneof("prefix")
    if kind == "vllm":
        return not prompt.vllm.page_tokens and not prompt.vllm.hash_tokens
    return kind == "sglang" and not prompt.sglang.page_tokens


def _blocks(question: Question, prompt: pb.ScorePrompt) -> int:
    chains, step = question.chains, question.step
    if not chains:
        return 0
    hashes = len(chains[min(chains)])
    return hashes // max(1, prompt.vllm.page_tokens // step) if step else hashes


def _all_hashes(asked: Asked) -> dict[int, list[int]]:
    return {size: list(hashes) for size, hashes in asked.chains.items()}


def _hash_some(hashes: Iterator[int], found: list[int]) -> bool:
    """Hashes as many as a turn of the loop has time for. True: these were the last."""
    end = time.monotonic() + PIECE_SECONDS
    for one in hashes:
        found.append(one)
        if time.monotonic() > end:
            return False
    return True


def _filled(
    response: pb.PlanResponse,
    request: pb.PlanRequest,
    questions: Sequence[PlanQuestion],
    steps: Iterator[list[Placement] | None],
    budget: Budget,
) -> Iterator[None]:
    """Puts the plan of each request into the answer as it comes."""
    asked = zip(questions, request.prompts, strict=True)
    for placements in steps:
        if placements is not None:
            planned, each = next(asked)
            message = response.plans.add(blocks=_blocks(planned.question, each.prompt))
            told = placements[: request.max_placements or 1]
            budget.take_answers("max_placements", request.max_placements, len(told))
            for number, placement in enumerate(told, 1):
                fill_placement(message.placements.add(), placement)
                if not number % _FILLED_OF_A_STEP:
                    yield None
        yield None


def _fill_scores(message: pb.PromptScores, scores: Sequence[CacheScore], blocks: int) -> None:
    # Filled in place: a message that is handed to a constructor is copied.
    message.blocks = blocks
    add = message.scores.add
    for engine, dp, device, host, disk, anywhere, page_tokens, fresh in scores:
        score = add(
            engine=engine,
            dp=dp,
            device_blocks=device,
            host_blocks=host,
            disk_blocks=disk,
            blocks=anywhere,
            page_tokens=page_tokens,
        )
        if fresh is not None:
            _fill_freshness(score.freshness, fresh)


def _source_to_pb(source: Source) -> pb.IndexSource:
    message = pb.IndexSource(
        engine=source.engine,
        dp=source.dp,
        address=source.address,
        live=source.live,
        blocks=[
            pb.TierBlocks(tier=common_pb2.Tier.ValueType(tier_of(medium)), medium=medium, blocks=count)
            for medium, count in sorted(source.blocks.items())
        ],
        page_tokens=source.page_tokens,
        snapshots=source.counts.snapshots,
        replays=source.counts.replays,
        new_logs=source.counts.new_logs,
        digests_equal=source.counts.digests_equal,
        digests_different=source.counts.digests_different,
        last_error=source.last_error,
        model=source.model,
        labels=dict(source.labels),
    )
    _fill_freshness(message.freshness, source.freshness)
    return message


def _fill_freshness(message: pb.Freshness, fresh: Freshness) -> None:
    state, message.log_id, message.next_sequence, message.lag_batches, idle_time, message.whole = fresh
    message.state = _STATES[state]
    if idle_time is not None:
        milliseconds, idle = round(idle_time * 1000), message.idle_time
        # FromMilliseconds costs more than all of the rest.
        idle.seconds, idle.nanos = milliseconds // 1000, milliseconds % 1000 * 1_000_000
