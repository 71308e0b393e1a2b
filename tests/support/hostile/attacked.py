"""What eight callers ask: a prefill with a registry and events, a rank with a cache that lends, and an index over both,
on the one event loop of a process of its own, each of whose turns is timed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from kvgrpc.events import KVEventBatch
from kvgrpc.events.model import BlockStored
from kvgrpc.model import Layout
from kvgrpc.prefetch.pools.shape import PageShape
from kvgrpc.pull import wire
from kvgrpc.pull.model import PullConfig
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.server import IndexServer
from kvgrpc.transfer import KVPoll
from tests.support.cache_serving import PAGE_TOKENS, open_cache_rank
from tests.support.rank_host import RankHost, RankProcess
from tests.support.secrets import proof, tokens_of

CALLERS = {name: role for role, names in (("rank", "abcde"), ("consumer", "fg"), ("operator", "h")) for name in names}
TOKENS = "\n".join(("rank:pair", "consumer index:index", *(f"{role} {name}*:{name}" for name, role in CALLERS.items())))
_PAUSE_SECONDS = 0.02
_NOTED_SECONDS = 0.01
_MOST_NOTED = 500
_SHAPE = PageShape.mha(layers=1, page_tokens=PAGE_TOKENS, heads=1, head_dim=8, dtype="float16")


class Attacked(RankProcess):
    """See the module. ``call`` what AttackedHost has."""

    def _kind(self) -> type[RankHost]:
        return AttackedHost


class Honest(RankProcess):
    """A decode that receives one room after the other."""

    def _kind(self) -> type[RankHost]:
        return HonestHost


class AttackedHost(RankHost):
    """``settings``: also ``storage``, the folder of the cache's pages."""

    def __init__(self, engine: str, role: str, settings: dict[str, Any]) -> None:
        self._longest = _time_each_turn()
        storage = settings.pop("storage")
        tokens = ServerSecurity(tokens=tokens_of(TOKENS))
        security: dict[str, Any] = {"server_security": tokens, "client_security": proof("pair")}
        events = {"publisher": "null"}
        super().__init__(engine, role, {"registry": "embedded", "events": events, **security, **settings})
        self._cache = open_cache_rank(
            Path(storage),
            engine="a-cache",
            layout=Layout(tp=2),
            shape=_SHAPE,
            host_pages=4_096,
            events=events,
            pull=PullConfig(staging_pages=64),
            **security,
        )
        self._index = IndexServer(
            ["127.0.0.1:0"],
            sources=[self.rank.address, self._cache.address],
            security=tokens,
            client_security=proof("index"),
        ).open()
        for number in range(500):
            hashes = [number * 100 + n for n in range(100)]
            batch = KVEventBatch(1.0, [BlockStored(hashes, None, [7] * 400, 4, None, "GPU")])
            self.rank.events.publish(batch)

    def publish_one_batch(self) -> None:
        self.rank.events.publish(KVEventBatch(1.0, [BlockStored([1], None, [7] * 4, 4, None, "GPU")]))

    def addresses(self) -> tuple[str, str, str]:
        return self.rank.address, self._cache.address, self._index.address

    def identity(self) -> str:
        peer: Any = self._cache.rank
        return json_format.MessageToJson(wire.identity_to_pb(peer._parts.cache_peer._keys.identity))

    def longest_turns(self) -> list[tuple[float, str]]:
        """Since the last call, the longest first: seconds of CPU time and of what."""
        found, self._longest[:] = sorted(self._longest, reverse=True), []
        return found

    def close(self, deadline: float = 5.0) -> tuple[bool, int, int]:
        self._index.close()
        self._cache.close()
        return super().close(deadline)


class HonestHost(RankHost):
    """What an honest decode does in its process."""

    def __init__(self, engine: str, role: str, settings: dict[str, Any]) -> None:
        trusted = {"client_security": proof("pair"), "bootstrap_allow": ("127.0.0.1",)}
        super().__init__(engine, role, {**trusted, **settings})

    def hand_over(self, rooms: Sequence[int], bootstrap: str, seconds: float) -> tuple[list[float], list[str]]:
        """As many as there is time for; how long each took, and why those that failed did."""
        from kvgrpc.transfer import KVReceiver

        took: list[float] = []
        failed: list[str] = []
        end = time.monotonic() + seconds
        for room in rooms:
            if (began := time.monotonic()) > end:
                break
            receiver = KVReceiver(self.rank.transfer, bootstrap, room)
            receiver.init([1, 2, 3], 1)
            while (state := receiver.poll()) not in (KVPoll.Success, KVPoll.Failed):
                time.sleep(0.0005)
            took.append(time.monotonic() - began)
            if state is KVPoll.Failed:
                failed.append(str(receiver.failure))
            time.sleep(_PAUSE_SECONDS)  # the pace at which requests come
        return took, failed


def _time_each_turn() -> list[tuple[float, str]]:
    """What each handle of the loop takes of its thread's CPU time, where that is long."""
    handles: Any = asyncio.Handle
    run, longest = handles._run, list[tuple[float, str]]()

    def measured(self: Any) -> None:
        began = time.thread_time()
        run(self)
        took = time.thread_time() - began
        if took > _NOTED_SECONDS and threading.current_thread().name == "kvgrpc-loop":
            longest.append((took, _what(self)))
            if len(longest) > 2 * _MOST_NOTED:
                longest[:] = sorted(longest, reverse=True)[:_MOST_NOTED]

    handles._run = measured
    return longest


def _what(handle: Any) -> str:
    """The same text for the same work."""
    task = getattr(handle._callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return repr(handle._callback)
    coroutine: Any = task.get_coro()
    name = task.get_name().split()[0]
    return coroutine.__qualname__ if name.startswith("Task-") else name
