"""Numbers by which whoever plans pulls knows which caches can exchange pages. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial

from kvgrpc.prefetch.storage.keys import PageIdentity
from kvgrpc.pull.common import CommonPages
from kvgrpc.pull.heads import Share


def page_forms(
    identity: PageIdentity, shares: Callable[[int], Sequence[Share]], common: CommonPages | None
) -> tuple[int, ...]:
    """Unsigned 64-bit digests of the whole model's pages, as the cache has them and as engines of other kinds have
    them: two caches that have one in common exchange pages. ``shares``, ``common``: see LentPages."""
    found = [_whole(identity, shares)]
    if common is not None:
        found.append(_whole(common.identity(identity), partial(common.shares, identity)))
    return tuple(map(_digest, found))


def _whole(identity: PageIdentity, shares: Callable[[int], Sequence[Share]]) -> PageIdentity:
    """The identity of these pages at an engine of one rank, where its pages are made of ours."""
    if identity.replicated:
        return replace(identity, tp_rank=0, tp_size=1)
    whole = shares(1)
    return whole[0].identity if whole else replace(identity, tp_rank=0)


def _digest(identity: PageIdentity) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(astuple(identity)).encode()).digest()[:8], "big")


__all__ = ["page_forms"]
