"""Tells of engines that a request names and nobody here knows: asking nobody looks like a cache that has nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvgrpc.observability.logging import one_line
from kvgrpc.pull.model import Holder

_SHOWN, _SHOWN_CHARS = 4, 100


def say_unknown(names: Collection[str], lend: Iterable[Holder], own: str) -> str:
    """A line about those of ``names`` that are neither the name nor the address of one of those that ``lend``; "" where
    all are. ``own``: our engine, which a router may name for all of its requests."""
    there = {each.address: each.engine for each in lend}
    known = {own, *there, *there.values()}
    unknown = [name for name in names if name not in known]
    if not unknown:
        return ""
    more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
    # A registry says them: also they are one line, of some length.
    there_in_order = sorted(there.items())[:_SHOWN]
    shown = [one_line(f"{engine} at {address}", 2 * _SHOWN_CHARS) for address, engine in there_in_order]
    lending = ", ".join(shown) + (f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else "")
    return (
        f"a request names {one_line(repr(unknown[0]))[:_SHOWN_CHARS]}{more} to take pages from, and no engine at the "
        "registry that lends to this one has that name or, letter by letter, that address: it is not asked. Those that "
        f"do: {lending or 'none'}. Name one of them, or have the cache of yours listen (or be advertised) there"
    )
