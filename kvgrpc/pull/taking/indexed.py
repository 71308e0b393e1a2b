"""Asks an index who has a prompt, so that only those are asked that have it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvgrpc.errors import KvGrpcError
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

    pages: dict[tuple[str, int], int]

    def best_first(self, holders: Sequence[Holder]) -> list[Holder]:
        """Those that have it, most pages first, then those whose events nobody reads; not those that lack it."""
        has = [each for each in holders if self.pages.get((each.engine, each.dp))]
        has.sort(key=lambda each: -self.pages[each.engine, each.dp])
        return [*has, *(each for each in holders if not each.tells)]


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

    async def ask(self, hashes: Sequence[str], timeout: float) -> IndexAnswer | None:
        """Never raises KvGrpcError."""
        if self._address in self._silent:
            return None
        values = [hash_key(sglang_event_hash(bytes.fromhex(each))) for each in hashes]
        prompt = pb.ScorePrompt(block_hashes=pb.BlockHashes(values=values), model=self._model)
        request = pb.ScoreRequest(prompts=[prompt])
        try:
            with domain_errors(self._address, "the index"):
                stub = IndexServiceStub(self._channels.get(self._address))
                answer = await stub.Score(request, timeout=min(timeout, self._seconds))
        except KvGrpcError as error:
            self._silent.failed(self._address)
            self._lines.warning("index", f"holders are looked for at the registry alone: {one_line(str(error))}")
            return None
        self._silent.forget(self._address)
        (scores,) = answer.prompts
        return IndexAnswer({(each.engine, each.dp): each.host_blocks for each in scores.scores})
