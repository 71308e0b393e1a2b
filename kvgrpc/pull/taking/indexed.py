"""Asks an index who has a prompt, so that only those are asked that have it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kvgrpc.errors import InvalidRequest, KvGrpcError, PeerUnreachable
from kvgrpc.events.log.digest import hash_key
from kvgrpc.hashing import sglang_event_hash
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.pull.model import Holder
from kvgrpc.pull.taking.silent import SilentHolders
from kvgrpc.registry.calls import domain_errors
from kvgrpc.rpc.dialing.channels import ChannelPool
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1.index_service_pb2_grpc import IndexServiceStub

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IndexAnswer:
    """Pages of a prompt that lie on the host or nearer, by engine and dp."""

    pages: Mapping[tuple[str, int], int]

    def best_first(self, holders: Sequence[Holder], has_other_names: Callable[[Holder], bool | None]) -> list[Holder]:
        """Those that have it, most pages first, then those of which the index cannot know; not those that lack it.
        ``has_other_names``: for its pages, by which the index was not asked. None: nobody knows yet, so they are asked
        where nobody else has the prompt, and then it is known."""
        has, others = list[Holder](), list[Holder]()
        for each in holders:
            (has if self.pages.get((each.engine, each.dp)) else others).append(each)
        has.sort(key=lambda each: -self.pages[each.engine, each.dp])
        unknown = [each for each in others if not each.tells or has_other_names(each)]
        if not has:
            unknown += [each for each in others if each.tells and has_other_names(each) is None]
        return [*has, *unknown]


# An index that lets a prompt wait for so long is left alone: it answers in milliseconds.
_FAIR_SECONDS = 0.2


class IndexedHolders:
    """Asks one index (``IndexService.Score``). Belongs to one event loop.

    It names pages by the 64 bits that events carry, which are enough to look for them and not to be given them: a
    holder is asked by the whole hashes. ``ask`` answers None while the index is away: then nobody is left out.
    """

    def __init__(self, address: str, model: str, channels: ChannelPool, seconds: float) -> None:
        """``model``: only engines that the registry knows by this name; ``seconds``: for an answer."""
        self._address, self._model, self._seconds = address, model, seconds
        self._channels = channels
        self._silent = SilentHolders()
        self._lines = RateLimited(_log)

    async def ask(self, prompts: Collection[Sequence[int]], timeout: float) -> IndexAnswer | None:
        """``prompts``: one prompt in the hashes of each kind of engine. Never raises KvGrpcError."""
        if self._address in self._silent:
            return None
        request = pb.ScoreRequest()
        for values in prompts:
            request.prompts.add(block_hashes=pb.BlockHashes(values=values), model=self._model)
        began, seconds = time.monotonic(), min(timeout / 2, self._seconds)  # the holders have the rest
        try:
            with domain_errors(self._address, "the index"):
                stub = IndexServiceStub(self._channels.get(self._address))
                answer = await stub.Score(request, timeout=seconds)
        except KvGrpcError as error:
            if isinstance(error, PeerUnreachable):
                may_take = min(_FAIR_SECONDS, self._seconds)
                self._silent.unanswered(self._address, seconds, may_take, time.monotonic() - began)
            elif not isinstance(error, InvalidRequest):  # that is said of this prompt alone
                self._silent.failed(self._address)
            self._lines.warning("index", f"holders are looked for at the registry alone: {one_line(str(error))}")
            return None
        self._silent.forget(self._address)
        pages = Counter[tuple[str, int]]()
        for scores in answer.prompts:
            pages |= Counter({(each.engine, each.dp): each.host_blocks for each in scores.scores})
        return IndexAnswer(pages)


def event_hash_of(page_hash: bytes) -> int:
    """The number by which events of SGLang and of kvgrpc's own caches name a page."""
    return hash_key(sglang_event_hash(page_hash))
