"""IndexService: checks what was asked, asks the index, puts the answer into messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

from kvgrpc import hashing
from kvgrpc.errors import InvalidRequest, ServerDraining
from kvgrpc.events.following.index import tier_of
from kvgrpc.events.following.messages import FollowerState
from kvgrpc.events.following.prompts import each_sglang_hash
from kvgrpc.events.following.sources import CacheScore, Freshness, Source
from kvgrpc.paging import page_size, page_token, read_page_token
from kvgrpc.rpc.blocking import BlockingCalls
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1.index_service_pb2_grpc import IndexServiceServicer

MAX_BLOCKS = 65_536
# What a request may carry; the server's own limit for a message lies above it.
MAX_TOKENS = 2**20
MAX_ENGINES = 1024
# Up to 5 ms of SHA-256 in blocks of 16 tokens or more, 20 to 70 in blocks of one, of which a turn of the loop has its
# share; longer prompts and blocks are hashed on threads, so many of them at once, and of one caller.
ON_THE_LOOP_TOKENS, _ON_THE_LOOP_BLOCK = 16_384, 1_024
_TURN_SECONDS = 0.002
MAX_LARGE, MAX_LARGE_OF_A_CALLER = 32, 8
_LIST = "ListSources"
_STATES = {state: pb.IndexSourceState.Value(f"INDEX_SOURCE_STATE_{state.name}") for state in FollowerState}


class Scores(Protocol):
    """What answers; ``kvgrpc.client.PrefixIndex`` is one."""

    def score(self, hashes: Sequence[int], engines: Collection[str] = (), most: int = 0) -> list[CacheScore]: ...
    def sources(self) -> list[Source]: ...


class IndexServicer(IndexServiceServicer):
    """Belongs to the event loop of the index."""

    def __init__(self, index: Scores) -> None:
        self._index = index
        self._draining = False
        self._one_goes_on = asyncio.Lock()
        self._large = BlockingCalls(
            "index-hash", "scores of long prompts", threads=2, most=MAX_LARGE, per_caller=MAX_LARGE_OF_A_CALLER
        )

    def drain(self) -> None:
        """Answers SERVER_DRAINING from now on."""
        self._draining = True

    def close(self) -> None:
        """Lets go of its threads."""
        self._large.close()

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        self._check_open()
        if len(request.engines) > MAX_ENGINES:
            raise InvalidRequest.of("engines", f"{len(request.engines)} names", f"at most {MAX_ENGINES}")
        hashes = await self._hashes_of(request)
        scores = self._index.score(hashes, frozenset(request.engines), request.max_scores)
        return _scores_to_pb(scores, len(hashes))

    async def ListSources(self, request: pb.ListSourcesRequest, context: Any) -> pb.ListSourcesResponse:
        self._check_open()
        after = read_page_token(_LIST, request.page_token)
        size = page_size(request.page_size)
        found = [source for source in self._index.sources() if _place(source) > after]
        token = page_token(_LIST, _place(found[size - 1])) if len(found) > size else ""
        return pb.ListSourcesResponse(sources=map(_source_to_pb, found[:size]), next_page_token=token)

    async def _hashes_of(self, request: pb.ScoreRequest) -> Sequence[int]:
        if request.WhichOneof("prefix") == "block_hashes":
            return _given(request.block_hashes)
        # A million tokens take seconds, which are not the other callers'.
        if _is_large(request):
            return await self._large.run(lambda: list(_hashes(request)))
        found: list[int] = []
        hashes = _hashes(request)
        if not _hash_some(hashes, found):
            async with self._one_goes_on:  # the turns of many would come one after the other
                last = False
                while not last:
                    await asyncio.sleep(0)
                    last = _hash_some(hashes, found)
        return found

    def _check_open(self) -> None:
        if self._draining:
            raise ServerDraining("this index stops: ask another one")


def _place(source: Source) -> str:
    return f"{source.engine}\0{source.dp:010d}"


def _given(hashes: pb.BlockHashes) -> Sequence[int]:
    if len(hashes.values) > MAX_BLOCKS:
        raise InvalidRequest.of("block_hashes.values", f"{len(hashes.values)} of them", f"at most {MAX_BLOCKS}")
    return hashes.values


def _hashes(request: pb.ScoreRequest) -> Iterator[int]:
    """Unsigned 64-bit hashes of the blocks of a request's tokens. Raises InvalidRequest."""
    kind = request.WhichOneof("prefix")
    if kind == "sglang":
        return _sglang_hashes(request.sglang)
    if kind == "vllm":
        return _vllm_hashes(request.vllm)
    raise InvalidRequest.of("prefix", "absent", "one of block_hashes, sglang, vllm")


def _hash_some(hashes: Iterator[int], found: list[int]) -> bool:
    """As many as a turn of the loop has time for; whether these were the last."""
    end = time.monotonic() + _TURN_SECONDS
    for one in hashes:
        found.append(one)
        if time.monotonic() > end:
            return False
    return True


def _is_large(request: pb.ScoreRequest) -> bool:
    sglang, vllm = request.sglang, request.vllm
    tokens, block = max(len(sglang.token_ids), len(vllm.token_ids)), max(sglang.page_tokens, vllm.page_tokens)
    return tokens > ON_THE_LOOP_TOKENS or min(block, tokens) > _ON_THE_LOOP_BLOCK


def _sglang_hashes(prompt: pb.SglangPrompt) -> Iterator[int]:
    _check_size("sglang", len(prompt.token_ids), "page_tokens", prompt.page_tokens)
    return each_sglang_hash(prompt.token_ids, prompt.page_tokens, cache_salt=prompt.cache_salt, bigram=prompt.bigram)


def _vllm_hashes(prompt: pb.VllmPrompt) -> Iterator[int]:
    _check_size("vllm", len(prompt.token_ids), "page_tokens", prompt.page_tokens)
    if prompt.algorithm not in ("", *hashing.BLOCK_HASH_ALGORITHMS):
        raise InvalidRequest.of(
            "vllm.algorithm", prompt.algorithm, f"one of {', '.join(hashing.BLOCK_HASH_ALGORITHMS)}"
        )
    hashes = hashing.each_block_hash(
        prompt.token_ids,
        prompt.page_tokens,
        hash_seed=prompt.hash_seed,
        algorithm=prompt.algorithm or "sha256",
        lora_name=prompt.lora_name,
        cache_salt=prompt.cache_salt,
    )
    return map(hashing.vllm_event_hash, hashes)


def _check_size(kind: str, tokens: int, name: str, size: int) -> None:
    if size < 1:
        raise InvalidRequest.of(f"{kind}.{name}", size, "at least 1, the engine's own")
    if tokens > MAX_TOKENS:
        raise InvalidRequest.of(f"{kind}.token_ids", f"{tokens} of them", f"at most {MAX_TOKENS}")
    if tokens // size > MAX_BLOCKS:
        raise InvalidRequest.of(f"{kind}.token_ids", f"{tokens // size} blocks", f"at most {MAX_BLOCKS} blocks")


def _scores_to_pb(scores: Sequence[CacheScore], blocks: int) -> pb.ScoreResponse:
    # Filled in place: a message that is handed to a constructor is copied.
    response = pb.ScoreResponse(blocks=blocks)
    add = response.scores.add
    for engine, dp, device_blocks, host_blocks, blocks_anywhere, fresh in scores:
        message = add()
        message.engine, message.dp = engine, dp
        message.device_blocks, message.host_blocks, message.blocks = device_blocks, host_blocks, blocks_anywhere
        _fill_freshness(message.freshness, fresh)
    return response


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
