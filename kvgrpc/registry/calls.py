"""The ground of a registry's clients: errors as domain exceptions, and when a call is repeated."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
from collections.abc import Iterator

import grpc

from kvgrpc.errors import KvGrpcError, PeerUnreachable
from kvgrpc.rpc.status import error_from

# CANCELLED: past 1,000 calls that wait to be read, a server of the library drops some at random.
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
# The longest time to live, for which another shape's rows may be in the way. No word of a registry silences us longer.
LONGEST_RETRY_AFTER = 600.0
REGISTRY = "the registry"


@contextlib.contextmanager
def domain_errors(address: str, who: str = REGISTRY) -> Iterator[None]:
    """Turns what a call of grpc.aio raises into KvGrpcError; ``who`` does not answer is PeerUnreachable."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        known = error_from(error)
        if error.code() in _NO_ANSWER and known.reason == KvGrpcError.reason:
            known = unreachable(address, error.details() or error.code().name, who)
        raise known from None
    except asyncio.TimeoutError:
        raise unreachable(address, "no answer in time", who) from None
    except asyncio.InvalidStateError:  # grpc.aio: a stream that ended before it was written to
        raise unreachable(address, "the stream ended", who) from None


def unreachable(address: str, why: str, who: str = REGISTRY) -> PeerUnreachable:
    return PeerUnreachable(f"{who} at {address} did not answer: {why}", metadata={"address": address})


def is_refusal(error: KvGrpcError) -> bool:
    """True if nobody listens at the address, as far as the library's text says it."""
    return isinstance(error, PeerUnreachable) and os.strerror(errno.ECONNREFUSED) in error.message


def pause_before(attempt: int, first: float, longest: float, error: KvGrpcError | None) -> float:
    """Seconds until the next attempt (counted from 0): jittered and doubling; never sooner than the error asks for, up
    to LONGEST_RETRY_AFTER.

    The jitter is wide, because all ranks of a cluster lose their registry at the same moment.
    """
    pause: float = random.uniform(0.1, 1.0) * min(first * 2 ** min(attempt, 16), longest)
    if error is None or error.retry_after is None:
        return pause
    return min(error.retry_after, LONGEST_RETRY_AFTER) + random.uniform(0.0, 0.1) * first
