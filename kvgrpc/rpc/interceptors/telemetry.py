"""Counts calls and how long they took, by method and code."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc

from kvgrpc.observability import metrics
from kvgrpc.rpc.interceptors.call import Behaviour, Context, Method


def telemetry(method: Method, inner: Behaviour) -> Behaviour:
    """The outermost layer: sees the status that the caller gets."""
    in_flight = metrics.RPC_IN_FLIGHT.labels(method.path)
    seconds = metrics.RPC_SECONDS.labels(method.path)
    succeeded = metrics.RPC_CALLS.labels(method.path, "OK")

    async def call(request: Any, context: Context) -> Any:
        in_flight.inc()
        begun = time.perf_counter()
        try:
            answer = await inner(request, context)
            succeeded.inc()
            return answer
        except BaseException as error:
            metrics.RPC_CALLS.labels(method.path, _code(error, context)).inc()
            raise
        finally:
            in_flight.dec()
            if not method.streams:
                seconds.observe(time.perf_counter() - begun)

    return call


def _code(error: BaseException, context: Context) -> str:
    code = context.code() if isinstance(error, grpc.aio.AbortError) else None
    if isinstance(code, grpc.StatusCode):
        return code.name
    # Besides what ``errors`` lets pass, the call was over before its answer: the caller went away.
    return "CANCELLED" if isinstance(error, (asyncio.CancelledError, grpc.aio.BaseError)) else "UNKNOWN"
