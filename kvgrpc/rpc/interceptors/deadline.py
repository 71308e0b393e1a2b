"""No unary call without an end."""

from __future__ import annotations

import asyncio
from typing import Any

from kvgrpc.errors import CallTooLong
from kvgrpc.rpc.interceptors.call import Behaviour, Context, Method

DEFAULT_SECONDS = 60.0


def deadline(method: Method, inner: Behaviour) -> Behaviour:
    """Ends a unary call that has no deadline after DEFAULT_SECONDS; callers with one are ended by the library."""
    if method.streams:
        return inner

    async def call(request: Any, context: Context) -> Any:
        if context.time_remaining() is not None:
            return await inner(request, context)
        return await _bounded(method, inner, request, context)

    return call


async def _bounded(method: Method, inner: Behaviour, request: Any, context: Context) -> Any:
    task = asyncio.current_task()
    assert task is not None
    seconds = DEFAULT_SECONDS
    expired = False

    def expire() -> None:
        nonlocal expired
        expired = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, expire)
    try:
        return await inner(request, context)
    except asyncio.CancelledError:
        if not expired:
            raise
        raise CallTooLong(
            f"no answer within the {seconds:g} s that a call without a deadline gets; set a deadline",
            metadata={"method": method.path, "limitMs": round(seconds * 1000)},
        ) from None
    finally:
        timer.cancel()
