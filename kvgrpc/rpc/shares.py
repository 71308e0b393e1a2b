"""A bounded number of places that many callers take from, with the share of one caller, host and connection."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvgrpc.errors import TooManyRequests
from kvgrpc.rpc.callers import caller, origin

# When whoever is refused a place may ask again: most are taken for less, and asking costs both sides a call.
RETRY_SECONDS = 1.0
# A host or a connection may have so many in any case: who has a share of nine should not get one.
AT_LEAST = 16

Account = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakenShare:
    """Places that somebody has: of which accounts, from the caller's name down."""

    accounts: tuple[Account, ...]
    places: int


class Shares:
    """The places that each caller has. Lives on one event loop.

    ``limit``: places there are; ``scope`` says of what, in a refusal, and ``setting`` which setting is the limit, where
    one is. ``connections``: whether connections have accounts too; not for what outlives them. ``of_one``: the caller
    whose places they all are; then its hosts and connections share them.

    One caller (``Caller.name``) may have as many as it leaves to others: half of the limit where it is alone, half of
    what is left where others are. A thousand ranks that share a token, or come through one proxy, are one caller: a
    fixed share that is enough for them would let two or three take all, and this takes a dozen. By the same rule each
    host leaves places to the others of its caller, and each connection to the others of its host: one process that
    asks for all there is does not lock out those who share its token.
    """

    def __init__(
        self, limit: int, scope: str, setting: str = "", *, connections: bool = True, of_one: str = ""
    ) -> None:
        self._limit = limit
        self._of_one = of_one
        self._scope = scope
        self._setting = f"; its {setting} is the bound" if setting else ""
        self._connections = connections
        self._of_callers: Counter[Account] = Counter()
        self._waiting: dict[tuple[Account, ...], deque[tuple[asyncio.Future[TakenShare], TakenShare]]] = {}
        self.count = 0

    def of_caller(self, name: str) -> int:
        return self._of_callers[(name,)]

    def by_host(self) -> dict[tuple[str, str], int]:
        """Places by caller and host, of shares without connections; a host that is its caller's name has that."""
        found = {(account[0], account[1]): n for account, n in self._of_callers.items() if len(account) > 1}
        elsewhere = Counter[str]()
        for (name, _), places in found.items():
            elsewhere[name] += places
        for account, places in self._of_callers.items():
            if len(account) == 1 and places > elsewhere[account[0]]:
                found[account[0], account[0]] = places - elsewhere[account[0]]
        return found

    def take(self, places: int = 1) -> TakenShare:
        """For the caller of the call that runs now; returns what to give back.

        Raises TooManyRequests past the limit or the caller's share of it.
        """
        return self.take_for(accounts_of_this_call(connections=self._connections), places)

    def take_for(self, accounts: tuple[Account, ...], places: int = 1) -> TakenShare:
        """Takes places for whoever has these accounts; returns and raises like ``take``."""
        wanted = TakenShare(accounts, places)
        refusal = self._refusal(wanted)
        if refusal is not None:
            raise refusal
        self._add(wanted)
        return wanted

    def check(self, places: int, instead_of: Sequence[TakenShare] = ()) -> None:
        """Raises as ``take`` would, once those places went back. Takes nothing."""
        wanted = TakenShare(accounts_of_this_call(connections=self._connections), places)
        for gone in instead_of:
            self._add(gone, -1)
        refusal = self._refusal(wanted)
        for gone in instead_of:
            self._add(gone)
        if refusal is not None:
            raise refusal

    def hold(self, accounts: tuple[Account, ...], places: int = 1) -> TakenShare:
        """For whoever has these accounts, whatever is left: they were given elsewhere."""
        taken = TakenShare(accounts, places)
        self._add(taken)
        return taken

    async def take_in_turn(self, places: int) -> TakenShare:
        """Takes places like ``take``, but waits for its turn: connections that wait get one place after the other."""
        wanted = TakenShare(accounts_of_this_call(connections=self._connections), places)
        if self._refusal(wanted) is None:
            self._add(wanted)
            return wanted
        future: asyncio.Future[TakenShare] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(wanted.accounts[-1:], deque()).append((future, wanted))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give_back(wanted)  # it was given in the same turn
            raise

    def give_back(self, taken: TakenShare, places: int | None = None) -> None:
        """All of it, or ``places`` of it."""
        places = taken.places if places is None else places
        self.count -= places
        for account in taken.accounts:
            self._of_callers[account] -= places
            if not self._of_callers[account]:
                del self._of_callers[account]
        if self._waiting:
            self._give_to_those_who_wait()

    def _add(self, wanted: TakenShare, sign: int = 1) -> None:
        self.count += sign * wanted.places
        for account in wanted.accounts:
            self._of_callers[account] += sign * wanted.places

    def _give_to_those_who_wait(self) -> None:
        for account in list(self._waiting):
            queue = self._waiting.pop(account)
            while queue and queue[0][0].done():
                queue.popleft()  # its call is over
            if queue and self._refusal(queue[0][1]) is None:
                future, wanted = queue.popleft()
                self._add(wanted)
                future.set_result(wanted)
            if queue:
                self._waiting[account] = queue  # behind the others

    def _refusal(self, wanted: TakenShare) -> TooManyRequests | None:
        free, places = self._limit - self.count, wanted.places
        if not places:
            return None
        if places > free:
            whose = f" ({self._of_one})" if self._of_one else ""
            text = f"{self.count} {self._scope} are there already{whose}, {self._limit} are the most"
            return self._too_many(text, self._limit, self.count + places, self._scope)
        share = free
        for depth, account in enumerate(wanted.accounts):
            own = self._of_callers[account]
            if depth or not self._of_one:
                if own + places > max(share, AT_LEAST if depth else 0):
                    return self._past_its_share(account, own, places, share)
                # What it could still take: each of these would be one less to take.
                share = max((share - own) // 2, 0)
        return None

    def _past_its_share(self, account: Account, own: int, places: int, share: int) -> TooManyRequests:
        who = "caller" if len(account) == 1 else "connection" if account[-1] == origin()[1] else "host"
        named = ", ".join(filter(None, account))
        text = (
            f"{own} {self._scope} are there already of one {who} ({named}), which may have as many as it leaves to "
            f"others: {share} are free"
        )
        return self._too_many(text, share, own + places, f"{self._scope} of one {who}")

    def _too_many(self, text: str, limit: int, value: int, scope: str) -> TooManyRequests:
        metadata = {"limit": limit, "value": value, "scope": scope}
        return TooManyRequests(text + self._setting, metadata=metadata, retry_after=RETRY_SECONDS)


def accounts_of_this_call(*, connections: bool = True) -> tuple[Account, ...]:
    """Of whoever makes it: the caller, its host where that is not its name, and its connection; none outside of calls,
    where nobody is held to a share."""
    name, (host, connection) = caller().name, origin()
    if not name:
        return ()
    accounts: list[Account] = [(name,)]
    if host and host != name:
        accounts.append((name, host))
    if connections and connection not in ("", host):  # of Unix sockets the library tells none apart
        accounts.append((name, connection))
    return tuple(accounts)
