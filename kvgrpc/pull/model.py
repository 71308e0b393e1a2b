"""The words of a pull as plain values: its settings, who lends, what became of each. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvgrpc.errors import Failure, InvalidRequest
from kvgrpc.model import Layout, RankRef

MAX_STAGING_PAGES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PullConfig:
    """The ``pull`` of a PrefetchConfig: this rank lends pages of its host cache, and takes pages of others.

    Attributes:
        engines: names of the engines to take from; empty: every engine of the registry that lends, with our model.
        staging_pages: pages of memory that pulls go through, half for what is lent and half for what is taken. Peers
            write into this memory alone, never into the cache.
        holders: engines that are asked for one prompt.
        answer_timeout: seconds that a holder may take to answer a question.
        stall_timeout: seconds without a further page after which a holder is given up.
        listen: "host:port" where pages are lent; empty: the rank's own host, a free port.
    """

    engines: tuple[str, ...] = ()
    staging_pages: int = 512
    holders: int = 4
    answer_timeout: float = 1.0
    stall_timeout: float = 2.0
    listen: str = ""

    def __post_init__(self) -> None:
        if not 2 <= self.staging_pages <= MAX_STAGING_PAGES:
            raise InvalidRequest.of("prefetch.pull.staging_pages", self.staging_pages, f"2 to {MAX_STAGING_PAGES}")
        if not 1 <= self.holders <= 64:
            raise InvalidRequest.of("prefetch.pull.holders", self.holders, "1 to 64")
        for name in ("answer_timeout", "stall_timeout"):
            if not 0 < getattr(self, name) <= 60:
                raise InvalidRequest.of(f"prefetch.pull.{name}", getattr(self, name), "above 0, at most 60 seconds")


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank that lends: the one that holds, of its engine, the part of the cache that we hold of ours.

    ``address``: of its services; ``sessions``: where rooms of its cache are served.
    """

    engine: str
    address: str
    sessions: str


@dataclass(frozen=True, slots=True)
class Lent:
    """A holder's answer: ``pages`` wait in the room, whose session is with ``holder``."""

    pages: int
    holder: RankRef
    layout: Layout


class PullDirection(enum.IntEnum):
    """Which way the pages of a pull went, as this rank sees it."""

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


__all__ = ["Holder", "Lent", "PullConfig", "PullDirection", "PullRow"]
