"""The owners of a table's rows and engines: each caller, and each of its hosts, leaves as many to others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from kvgrpc.model import RankId
from kvgrpc.registry.acceptance import MAX_ENGINES, MAX_ROWS
from kvgrpc.registry.model import RankRow
from kvgrpc.registry.table import EngineTable
from kvgrpc.rpc.shares import Account, Shares, TakenShare, accounts_of_this_call


class Owners:
    """The shares of one table. Whoever adds a row to it or removes one says so here, before the table changes.

    What is not said by a caller (rows of a registry that knew no owners) counts for all and for nobody.
    """

    def __init__(self, table: EngineTable, max_rows: int = MAX_ROWS, max_engines: int = MAX_ENGINES) -> None:
        self._table = table
        self._rows = Shares(max_rows, "rows", connections=False)
        self._engines = Shares(max_engines, "engines", connections=False)
        self._of_rows: dict[RankId, TakenShare] = {}
        self._of_engines: dict[str, TakenShare] = {}

    @contextlib.contextmanager
    def room_for(self, rows: Sequence[RankRow]) -> Iterator[tuple[Account, ...]]:
        """Holds places for those that are not there yet, until they are; gives the owner of them.

        Raises TooManyRequests where the caller of the call that runs now has its share.
        """
        held = [self._table.leased(row.ref.rank) for row in rows]
        replaced = [
            old.row.ref.rank for old, row in zip(held, rows, strict=True) if old and old.row.ref.epoch < row.ref.epoch
        ]
        new = sum(old is None for old in held)
        engines = sum(self._table.engine(name) is None for name in {row.ref.rank.engine for row in rows})
        self._engines.check(engines)
        self._rows.check(new + len(replaced), [self._of_rows[rank] for rank in replaced])
        accounts = accounts_of_this_call(connections=False)
        taken = self._rows.hold(accounts, new), self._engines.hold(accounts, engines)
        try:
            yield accounts
        finally:
            self._rows.give_back(taken[0])
            self._engines.give_back(taken[1])

    def rows(self) -> dict[tuple[str, str], int]:
        """Rows that each caller registered from each of its hosts."""
        return self._rows.by_host()

    def add(self, rank: RankId, accounts: tuple[Account, ...]) -> None:
        self._of_rows[rank] = self._rows.hold(accounts)
        if self._table.engine(rank.engine) is None:
            self._of_engines[rank.engine] = self._engines.hold(accounts)

    def remove(self, rank: RankId) -> None:
        self._rows.give_back(self._of_rows.pop(rank))
        engine = self._table.engine(rank.engine)
        if engine is not None and engine.registered == 1:
            self._engines.give_back(self._of_engines.pop(rank.engine))
