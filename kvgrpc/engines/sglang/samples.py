"""Parallel samples of one request (``n`` above 1), which SGLang computes as requests of the same bootstrap room.

Each becomes an attempt of the room. Both engines get the same body, and SGLang's tokenizer process makes of it, in the
same order on both sides, one request that warms the prefix cache and then ``n`` more, each with a new request id: the
one thing of a sample that is its own. So the number of the sample is written there, and read in the scheduler where a
request gets its sender or receiver. Two requests that have a room in common by mistake have no such number, and the
later one fails as ever. Imports nothing of SGLang.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

_COUNT = "_kvgrpc_samples"
_NUMBER = re.compile(r"-kvgrpc-sample-(\d{1,6})$")


def counting(is_ours: Callable[[], bool]) -> Callable[..., None]:
    """A hook after ``GenerateReqInput.__getitem__``, of which SGLang makes the copies that it sends as samples."""

    def count(one: Any, every: Any, index: Any) -> None:
        if getattr(every, "parallel_sample_num", 1) > 1 and one.bootstrap_room is not None and is_ours():
            vars(one).setdefault(_COUNT, itertools.count())

    return count


def numbered(original: Callable[[Any], Any], one: Any) -> Any:
    """A hook around ``GenerateReqInput.regenerate_rid``: the copies share their counter."""
    rid = original(one)
    count = vars(one).get(_COUNT)
    if count is None or not isinstance(rid, str):
        return rid
    one.rid = f"{rid}-kvgrpc-sample-{next(count)}"
    return one.rid


def attempt_of(rid: Any) -> int:
    """Of the request's room; 0 for whatever is no sample."""
    found = _NUMBER.search(rid) if isinstance(rid, str) else None
    return int(found[1]) if found else 0


def naming_attempt(original: Callable[..., Any], queue: Any, request: Any, *arguments: Any, **more: Any) -> Any:
    """A hook around what makes the sender, or the receiver, of a request: SGLang tells it the room and no id.

    Another backend's manager is left alone.
    """
    manager = queue.kv_manager
    if not hasattr(manager, "attempt"):
        return original(queue, request, *arguments, **more)
    manager.attempt = attempt_of(request.rid)
    try:
        return original(queue, request, *arguments, **more)
    finally:
        manager.attempt = 0
