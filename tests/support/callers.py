"""Who makes the calls of a test, as the interceptors of a server say it to what counts callers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvgrpc.rpc.callers import CALLER, PEER, Caller


@contextlib.contextmanager
def calls_of(name: str) -> Iterator[None]:
    """Calls are those of ``name`` until somebody else is set; afterwards of whoever made them before."""
    caller, peer = CALLER.set(Caller(name)), PEER.set("")
    try:
        yield
    finally:
        PEER.reset(peer)
        CALLER.reset(caller)
