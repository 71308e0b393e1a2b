"""A part that is opened on a thread is closed where its opening was over before it came."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.dataplane import open_plane
from kvgrpc.model import Role
from kvgrpc.prefetch.storage.keys import KeyMode, Keys, PageIdentity
from kvgrpc.pull.lending.exported import ExportedPages
from kvgrpc.pull.lending.lender import LentPages
from kvgrpc.pull.model import PullConfig
from kvgrpc.pull.staging import Staging
from kvgrpc.pull.taking.peers import PeersBackend
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.server import RankConfig, open_cache
from kvgrpc.server.cache import peer
from kvgrpc.server.closing import opened_aside
from tests.support.cache_serving import open_cache_rank
from tests.support.faults.storage import FaultyBackend, memory_backend
from tests.support.waiting import wait_until

# Longer than any opening has time for.
_NEVER_SECONDS = 40.0


def own_threads() -> set[threading.Thread]:
    """Those of kvgrpc but those that the process has, which come and go with what other tests do."""
    found = [each for each in threading.enumerate() if each.name.startswith("kvgrpc-")]
    return {each for each in found if not each.name.startswith(("kvgrpc-loop", "kvgrpc-log"))}


def given_up(begun: list[None], opening: Callable[[float], object]) -> None:
    """Opens until its time is over when the slow part has begun: on a busy machine a short time may be over before."""
    for seconds in (0.1, 1.0, 10.0):
        with pytest.raises(TimeoutError):
            opening(seconds)
        if begun:
            return
    raise AssertionError("its slow part did not begin")


def test_what_comes_too_late_is_closed() -> None:
    came, begun, closed = threading.Event(), list[None](), list[str]()

    def make(name: str) -> str:
        begun.append(None)
        assert came.wait(_NEVER_SECONDS)
        return name

    given_up(begun, lambda seconds: LoopThread.shared().run(opened_aside(make, "part", close=closed.append), seconds))
    assert not closed
    came.set()
    wait_until(lambda: closed == ["part"] * len(begun))
    late = list(closed)
    assert LoopThread.shared().run(opened_aside(make, "in time", close=closed.append), 10.0) == "in time"
    assert closed == late


def lent() -> tuple[LentPages, PeersBackend]:
    keys = Keys(KeyMode.KVGRPC, PageIdentity(model="m", dtype="float16", layout="x", page_size=4))
    return LentPages(ExportedPages(16, 4096), keys, 4096, 4, "float16"), PeersBackend(None)


def cache_config(**more: Any) -> RankConfig:
    pull = PullConfig(staging_pages=16)
    settings = {"engine": "E", "role": Role.UNIFIED, "pools": (), "data_plane": "shm", "registry": "", **more}
    return RankConfig(pull=pull, **settings)


def test_a_cache_whose_memory_is_taken_too_late_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before, going_on, begun, closed = own_threads(), threading.Event(), list[None](), list[bool]()
    close = peer.CachePeer.close_now

    def slow(*arguments: Any, **more: Any) -> Any:
        begun.append(None)
        assert going_on.wait(_NEVER_SECONDS)
        return open_plane(*arguments, **more)

    monkeypatch.setattr(peer, "open_plane", slow)
    monkeypatch.setattr(peer.CachePeer, "close_now", lambda late: closed.append(close(late)))
    given_up(begun, lambda seconds: open_cache(cache_config(start_timeout=seconds), None, lent()))
    going_on.set()
    wait_until(lambda: closed == [True] * len(begun))
    wait_until(lambda: own_threads() <= before)


def test_a_cache_that_cannot_be_put_together_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_threads()

    def none_left(*arguments: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(peer, "Landings", none_left)
    with pytest.raises(OSError, match="Too many"):
        open_cache(cache_config(), None, lent())
    wait_until(lambda: own_threads() <= before)


def test_a_close_says_that_a_page_may_still_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's memory, from which it is copied, is to stay then."""
    server = open_cache(cache_config(), None, lent())
    with monkeypatch.context() as patched:
        patched.setattr(Staging, "close", lambda memory, seconds: False)
        assert server.close() is False
    assert server.close() is True


@pytest.mark.slow
def test_a_rank_whose_cache_comes_too_late_leaves_no_thread(tmp_path: Path) -> None:
    """Its opening is given up 5 s after its time."""
    storage = memory_backend()
    before, going_on = own_threads(), threading.Event()

    class Slow(FaultyBackend):
        def register(self, memory: Any) -> None:
            going_on.wait(30.0)
            super().register(memory)

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        open_cache_rank(tmp_path, Slow(storage), start_timeout=0.1)
    assert time.monotonic() - began < 20.0
    going_on.set()
    wait_until(lambda: any(each.name.startswith("kvgrpc-prefetch") for each in own_threads() - before), 10.0)
    wait_until(lambda: own_threads() <= before)
