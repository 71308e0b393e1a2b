"""The words of a pull as plain values: its settings, who lends, what became of each. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from kvgrpc.errors import Failure
from kvgrpc.fields import seconds, violations
from kvgrpc.model import Layout, RankId, RankRef, raise_if
from kvgrpc.net import check_target

MAX_STAGING_PAGES = 1 << 20
# Batches of small pages, of several readers, find room beside each other.
_LEAST_STAGED, _MOST_SMALL_STAGED, _LEAST_STAGED_BYTES = 512, 8192, 128 << 20
ShortSeconds = Annotated[float, seconds(60)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullConfig:
    """The ``pull`` of a PrefetchConfig: this rank lends pages of its host cache, and takes pages of others."""

    engines: tuple[str, ...] = ()
    """Names of the engines to take from; empty: every engine of the registry that lends, with our model."""
    index: str = ""
    """ "host:port" of an index that is asked first who has a prompt; empty: engines of the registry are."""
    staging_pages: Annotated[int, Meta(ge=2, le=MAX_STAGING_PAGES)] | None = None
    """Pages of memory that pulls go through, half for what is lent and half for what is taken. Peers write into this
    memory alone, never into the cache. None: 512, of small pages as many as make 128 MiB, at most 8192."""
    holders: Annotated[int, Meta(ge=1, le=64)] = 4
    """Engines that are asked for one prompt."""
    answer_timeout: ShortSeconds = 1.0
    """Seconds that a holder may take to answer a question."""
    stall_timeout: ShortSeconds = 2.0
    """Seconds without a further page after which a holder is given up."""
    listen: str = ""
    """ "host:port" where pages are lent; empty: the rank's own host, a free port."""

    def staged(self, page_bytes: int) -> int:
        """The number of pages of this size that pulls go through."""
        if self.staging_pages is not None:
            return self.staging_pages
        return max(_LEAST_STAGED, min(_LEAST_STAGED_BYTES // page_bytes, _MOST_SMALL_STAGED))

    def __post_init__(self) -> None:
        raise_if(list(violations(self, "prefetch.pull.")))
        if self.index:
            check_target(self.index, "prefetch.pull.index")


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank that lends: of its engine, the one that holds the part of the cache that we hold of ours, or some of it.

    ``address``: of its services; ``sessions``: where rooms of its cache are served; ``dp``: which cache of the engine;
    ``tells``: whether its events say what it has, so that an index can know; ``layout``: sizes of its engine; ``tp``:
    which share of the heads it has; ``tp_size``: of its engine, where its pages are other ones than ours, else 0;
    ``common``: its pages are had in the common order, by their common names.
    ``others``: where our heads lie at several of its engine's ranks, those beside it: all of them have to lend.
    """

    engine: str
    address: str
    sessions: str
    dp: int = 0
    tells: bool = False
    layout: Layout = field(default_factory=Layout)
    tp: int = 0
    tp_size: int = 0
    common: bool = False
    others: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """The holder that has most of a prompt: so many leading ``pages``. ``name``: by which this holder alone knows it.
    ``others``: the same of each of the holder's ``others``; ``pages`` are those that all of them have."""

    holder: Holder
    pages: int
    name: bytes
    others: tuple[Found, ...] = ()


@dataclass(frozen=True, slots=True)
class Lent:
    """A holder's answer: ``pages`` wait in the room, whose session is with ``holder``."""

    pages: int
    holder: RankRef
    layout: Layout

    @property
    def session(self) -> RankRef:
        """The holder as sessions of its cache know it."""
        return alone(self.holder, self.layout)[0]


def alone(ref: RankRef, layout: Layout) -> tuple[RankRef, Layout]:
    """A rank as sessions of its cache know it: a replica of one rank.

    A pull moves whole pages of one cache to one other, which has asked for them by what they are: how many ranks
    either engine has says nothing about who owes what.
    """
    rank = ref.rank
    number = ((rank.dp * layout.pp + rank.pp) * layout.cp + rank.cp) * layout.tp + rank.tp
    return RankRef(RankId(rank.engine, number), ref.epoch), Layout(dp=layout.ranks)


class PullDirection(enum.IntEnum):
    """The way that the pages of a pull went, seen from this rank."""

    TAKEN = 1
    LENT = 2


@dataclass(frozen=True, slots=True)
class PullRow:
    """One pull. Counts are pages; ``began_at`` is Unix time, ``failure`` why it brought less than was lent."""

    room: int
    direction: PullDirection
    peer: RankRef
    address: str
    asked: int
    lent: int
    done: int
    nbytes: int
    began_at: float
    took_seconds: float
    ended: bool
    failure: Failure | None


__all__ = ["Found", "Holder", "Lent", "PullConfig", "PullDirection", "PullRow", "alone"]
