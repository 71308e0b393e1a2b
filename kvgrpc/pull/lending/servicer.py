"""PullService over a Lender and a PullBook: decode the request, call, encode the answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvgrpc.errors import ServerDraining, TooManyRequests
from kvgrpc.model import Layout, RankRef
from kvgrpc.prefetch.storage.keys import PageIdentity
from kvgrpc.pull import wire
from kvgrpc.pull.book import PullBook
from kvgrpc.pull.lending.lender import RETRY_SECONDS, Lender, Loan
from kvgrpc.pull.lending.prompts import CountedPrompts
from kvgrpc.pull.model import Lent, PullRow
from kvgrpc.pull.staging import Staging
from kvgrpc.rpc.blocking import BlockingCalls
from kvgrpc.rpc.callers import caller, check_speaker
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.security import CallerRole
from kvgrpc.rpc.within import within
from kvgrpc.v1 import pull_service_pb2 as pb
from kvgrpc.v1.pull_service_pb2_grpc import PullServiceServicer
from kvgrpc.wire import rank_ref_from_pb

_THREADS, _WAITING = 2, 64
GIVES_WAY_SECONDS = 0.05
"""For so long a batch waits for hand-offs that are being written."""
PIECE_BYTES = 16 << 20
"""A batch is no larger where they have not ended then: a fifth of 10 Gbit/s."""
_LOOK_SECONDS = 0.002


class PullServicer(PullServiceServicer):
    """Of one rank; belongs to the process's event loop."""

    def __init__(
        self,
        ref: RankRef,
        layout: Layout,
        identity: PageIdentity,
        lender: Lender,
        staging: Staging,
        book: PullBook,
        common: PageIdentity | None = None,
        hands_off: Callable[[], bool] = lambda: False,
    ) -> None:
        """``common``: of our pages in the common order, where the lender knows it; ``hands_off``: whether hand-offs of
        this rank are being written, which go first."""
        self._ref = ref
        self._layout = layout
        self._identity, self._common = identity, common
        self._lender = lender
        self._hands_off = hands_off
        self._piece = max(1, PIECE_BYTES // staging.page_bytes)
        self._giving_way = 0
        self._staging = staging
        self._book = book
        self._blocking = BlockingCalls("lend", "calls that lend", threads=_THREADS, most=_WAITING)
        self._counted = CountedPrompts()
        # Of calls that wait for pages which are lent.
        self._waiting: set[asyncio.Event] = set()
        self._draining = False

    def drain(self) -> None:
        """Lends nothing more; what is lent goes on."""
        self._draining = True

    def undrain(self) -> None:
        """Lends again."""
        self._draining = False

    def close(self) -> None:
        self._draining = True
        self._blocking.close()

    async def CountPages(self, request: pb.CountPagesRequest, context: Any) -> pb.CountPagesResponse:
        self._check_open()
        common = wire.asked_as_common(request.identity, self._identity, self._common)
        wire.check_name("prompt_name", request.prompt_name)
        return pb.CountPagesResponse(host_pages=await self._blocking.run(partial(self._count_leading, request, common)))

    async def LendPages(self, request: pb.LendPagesRequest, context: Any) -> pb.LendPagesResponse:
        self._check_open()
        common = wire.asked_as_common(request.identity, self._identity, self._common)
        wire.check_lend(request)
        taker = rank_ref_from_pb(request.taker)
        check_speaker(taker, None, "taker")
        pages = await self._lend_soon(request, taker, common)
        if pages is None:
            return pb.LendPagesResponse(prompt_unknown=True)
        return wire.lent_to_pb(Lent(pages, self._ref, self._layout))

    async def ListPulls(self, request: pb.ListPullsRequest, context: Any) -> pb.ListPullsResponse:
        rows = [row for row in self._book.rows(open_only=request.open_only) if self._shows(row)]
        return pb.ListPullsResponse(
            pulls=map(wire.row_to_pb, rows),
            lending_pages=self._staging.lending.size,
            lent_pages=self._staging.lending.taken,
        )

    def _count_leading(self, request: pb.CountPagesRequest, common: bool) -> int:
        """On a thread."""
        hashes = wire.hashes_from_pb(request.page_hashes)
        count = self._lender.count(hashes, common=common)
        if count and request.prompt_name:
            self._counted.note(request.prompt_name, hashes[:count])
        return count

    async def _lend_soon(self, request: pb.LendPagesRequest, taker: RankRef, common: bool) -> int | None:
        """Waits a moment where all is lent: pages of a batch are back before a taker would ask again."""
        loop = asyncio.get_running_loop()
        await self._give_way(loop.time() + GIVES_WAY_SECONDS)
        end = loop.time() + RETRY_SECONDS
        while True:
            returned = asyncio.Event()  # before the look: what comes back meanwhile counts
            self._waiting.add(returned)
            most = self._piece if self._hands_off() else None
            try:
                return await self._blocking.run(partial(self._lend, request, taker, common, loop, most))
            except TooManyRequests:
                if loop.time() >= end:
                    raise
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(end - loop.time(), returned.wait())
            finally:
                self._waiting.discard(returned)

    async def _give_way(self, end: float) -> None:
        """Waits until no hand-off is being written, or ``end``. Past so many who wait others do not: each looks, and
        that is time of the loop."""
        if self._giving_way >= _WAITING:
            return
        self._giving_way += 1
        try:
            while self._hands_off():
                if asyncio.get_running_loop().time() >= end:
                    return
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._giving_way -= 1

    async def _settle(self, loan: Loan) -> None:
        await self._lender.settle(loan)
        for returned in self._waiting:
            returned.set()

    def _lend(
        self,
        request: pb.LendPagesRequest,
        taker: RankRef,
        common: bool,
        loop: asyncio.AbstractEventLoop,
        most: int | None,
    ) -> int | None:
        """On a thread; None: the prompt that was counted is not known. The loan is settled whether or not the caller
        still waits for the answer."""
        hashes = self._hashes(request)
        if hashes is None:
            return None
        loan = self._lender.lend(hashes, request.first_page, request.room, taker, common=common, most=most)
        if loan is None:
            return 0
        loop.call_soon_threadsafe(lambda: background(self._settle(loan), f"loan {request.room}"))
        return len(loan.pages)

    def _hashes(self, request: pb.LendPagesRequest) -> Sequence[str] | None:
        if not request.counted_prompt:
            return wire.hashes_from_pb(request.page_hashes)
        prompt = self._counted.get(request.counted_prompt)
        return None if prompt is None else prompt[: request.first_page + request.pages]

    def _shows(self, row: PullRow) -> bool:
        """A rank sees those that it has a part in, as of rooms: who knows a room's number may name it."""
        known = caller()
        return known.role is not CallerRole.RANK or any(known.speaks_for(ref, None) for ref in (self._ref, row.peer))

    def _check_open(self) -> None:
        if self._draining:
            raise ServerDraining(f"{self._ref} drains and lends nothing more", retry_after=1.0)
