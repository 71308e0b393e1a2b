"""PullService over a Lender and a PullBook: decode the request, call, encode the answer."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from kvgrpc.errors import ServerDraining
from kvgrpc.model import Layout, RankRef
from kvgrpc.prefetch.storage.keys import PageIdentity
from kvgrpc.pull import wire
from kvgrpc.pull.book import PullBook
from kvgrpc.pull.lender import Lender
from kvgrpc.pull.model import Lent, PullRow
from kvgrpc.pull.staging import Staging
from kvgrpc.rpc.blocking import BlockingCalls
from kvgrpc.rpc.callers import caller, check_speaker
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.security import CallerRole
from kvgrpc.v1 import pull_service_pb2 as pb
from kvgrpc.v1.pull_service_pb2_grpc import PullServiceServicer
from kvgrpc.wire import rank_ref_from_pb

_THREADS, _WAITING, _WAITING_OF_ONE = 2, 64, 16


class PullServicer(PullServiceServicer):
    """Of one rank; belongs to the process's event loop."""

    def __init__(
        self, ref: RankRef, layout: Layout, identity: PageIdentity, lender: Lender, staging: Staging, book: PullBook
    ) -> None:
        self._ref = ref
        self._layout = layout
        self._identity = identity
        self._lender = lender
        self._staging = staging
        self._book = book
        self._blocking = BlockingCalls(
            "lend", "calls that lend", threads=_THREADS, most=_WAITING, per_caller=_WAITING_OF_ONE
        )
        self._draining = False

    def drain(self) -> None:
        """Lends nothing more; what is lent goes on."""
        self._draining = True

    def close(self) -> None:
        self._draining = True
        self._blocking.close()

    async def CountPages(self, request: pb.CountPagesRequest, context: Any) -> pb.CountPagesResponse:
        self._check_open()
        wire.check_identity(request.identity, self._identity)
        count = await self._blocking.run(lambda: self._lender.count(wire.hashes_from_pb(request.page_hashes)))
        return pb.CountPagesResponse(host_pages=count)

    async def LendPages(self, request: pb.LendPagesRequest, context: Any) -> pb.LendPagesResponse:
        self._check_open()
        wire.check_identity(request.identity, self._identity)
        wire.check_lend(request)
        taker = rank_ref_from_pb(request.taker)
        check_speaker(taker, None, "taker")
        pages = await self._blocking.run(partial(self._lend, request, taker, asyncio.get_running_loop()))
        return wire.lent_to_pb(Lent(pages, self._ref, self._layout))

    async def ListPulls(self, request: pb.ListPullsRequest, context: Any) -> pb.ListPullsResponse:
        rows = [row for row in self._book.rows(open_only=request.open_only) if self._shows(row)]
        return pb.ListPullsResponse(
            pulls=map(wire.row_to_pb, rows),
            lending_pages=self._staging.lending.size,
            lent_pages=self._staging.lending.taken,
        )

    def _lend(self, request: pb.LendPagesRequest, taker: RankRef, loop: asyncio.AbstractEventLoop) -> int:
        """On a thread. The loan is settled whether or not the caller still waits for the answer."""
        hashes = wire.hashes_from_pb(request.page_hashes)
        loan = self._lender.lend(hashes, request.first_page, request.room, taker)
        if loan is None:
            return 0
        loop.call_soon_threadsafe(lambda: background(self._lender.settle(loan), f"loan {request.room}"))
        return len(loan.pages)

    def _shows(self, row: PullRow) -> bool:
        """A rank sees those that it has a part in, as of rooms: who knows a room's number may name it."""
        known = caller()
        return known.role is not CallerRole.RANK or any(known.speaks_for(ref, None) for ref in (self._ref, row.peer))

    def _check_open(self) -> None:
        if self._draining:
            raise ServerDraining(f"{self._ref} drains and lends nothing more", retry_after=1.0)
