"""The words of the interceptors: a method, how it behaves, and what a layer makes of that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]
# Takes the request (or the stream of them) and the context; returns the response, or None where responses are a stream
# that it wrote to the context itself. One signature for all four arities.
Behaviour = Callable[[Any, Context], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Method:
    """``path``: "/package.Service/Method"; ``streams``: in either direction."""

    path: str
    streams: bool


# Wraps the behaviour of a method once, when it is first called; returns it as it is where there is nothing to do.
Layer = Callable[[Method, Behaviour], Behaviour]
