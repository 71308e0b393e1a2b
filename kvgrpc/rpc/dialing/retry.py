"""When an idempotent unary call is repeated: one rule, whichever of our clients calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from kvgrpc.errors import KvGrpcError, PeerUnreachable

T = TypeVar("T")
_FIRST_SECONDS, _LONGEST_SECONDS = 0.05, 2.0


def may_repeat(error: BaseException) -> bool:
    """True if the very same call may succeed later.

    UNAVAILABLE means that, with or without a time, and so does RetryInfo, whatever the code: a server of ours sends it
    for nothing else.
    """
    return isinstance(error, KvGrpcError) and (error.code == "UNAVAILABLE" or error.retry_after is not None)


async def repeated(call: Callable[[float], Awaitable[T]], timeout: float) -> T:
    """Awaits ``call(seconds left)`` until it succeeds, may not be repeated, or ``timeout`` seconds would be over.

    Waits with full jitter, never shorter than RetryInfo says. Raises the last error; one of silence tells
    what the server answered before.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout
    jitter = tenacity.wait_random_exponential(multiplier=_FIRST_SECONDS, max=_LONGEST_SECONDS)

    def wait(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.retry_after if isinstance(error, KvGrpcError) else None
        return max(jitter(state), asked or 0.0)

    def over(state: tenacity.RetryCallState) -> bool:
        return clock() + state.upcoming_sleep >= deadline

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(may_repeat), wait=wait, stop=over, reraise=True, sleep=asyncio.sleep
    )
    said: KvGrpcError | None = None
    try:
        async for attempt in retrying:
            with attempt:
                try:
                    return await call(max(deadline - clock(), 0.001))
                except KvGrpcError as error:
                    said = error if error.answered else said
                    raise
    except PeerUnreachable as silence:
        if said is None:
            raise
        text = f"{silence.message}; before that it answered {said}"
        raise PeerUnreachable(text, metadata=silence.metadata) from said
    raise AssertionError("tenacity ends by returning or raising")
