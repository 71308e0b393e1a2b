"""The pipeline stages of a prefill engine, and a room that each has a part of. Imports nothing of SGLang.

SGLang looks at requests that wait for decode in its first stage alone, and all stages take them up, or fail them, when
that one says so: it asks its senders how far all stages have come. SGLang has a store that carries entries of the
other stages to the first; these write into it whenever a room of theirs changes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Protocol

from kvgrpc.rpc.loop import LoopThread
from kvgrpc.transfer import KVPoll, KVSender


class ConsensusStore(Protocol):
    """SGLang's PPConsensusStore: what a stage sets or pops, the first one sees a little later."""

    def __setitem__(self, key: str, value: int) -> None: ...

    def pop(self, key: str) -> int | None: ...

    def collect(self, key: str) -> list[int | None]:
        """Of all stages, its own first; for the first stage alone."""
        ...


class Stages:
    """This stage's part. ``changes``: a descriptor that is readable when a room of the rank changed.

    An entry goes with ``drop``, or, where SGLang forgot its sender, at the next change of any room.
    """

    def __init__(self, store: ConsensusStore, is_first: bool, changes: int) -> None:
        self._store, self._is_first, self._changes = store, is_first, changes
        self._lock = threading.Lock()
        # Of each room that was told the sender, and what was told.
        self._told: dict[str, tuple[weakref.ref[KVSender], KVPoll]] = {}
        if not is_first:
            loop = LoopThread.shared().loop
            loop.call_soon_threadsafe(loop.add_reader, changes, self._tell_changes)

    def add(self, sender: KVSender) -> None:
        """A room of the same number that is still open keeps its entry: the newcomer has failed in each stage."""
        key = _key(sender)
        with self._lock:
            known = self._told.get(key)
            other = known and known[0]()
            if not self._is_first and (other is None or other.ended):
                self._tell(key, sender)

    def drop(self, sender: KVSender) -> None:
        key = _key(sender)
        with self._lock:
            known = self._told.get(key)
            if known is not None and known[0]() is sender:
                self._forget(key)

    def agreed(self, sender: KVSender) -> KVPoll:
        """The least that any stage says of the sender's room, for the first stage; a failure of one counts for all."""
        own = sender.poll()
        if not self._is_first or own is KVPoll.Failed:
            return own
        others = self._store.collect(_key(sender))[1:]
        if KVPoll.Failed in others:
            return KVPoll.Failed
        return min(own, *(KVPoll.Bootstrapping if other is None else KVPoll(other) for other in others))

    def _tell_changes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._changes)
        with self._lock:
            for key, (known, told) in list(self._told.items()):
                sender = known()
                if sender is None:
                    self._forget(key)
                elif sender.poll() is not told:
                    self._tell(key, sender)

    def _tell(self, key: str, sender: KVSender) -> None:
        poll = sender.poll()
        self._told[key] = weakref.ref(sender), poll
        self._store[key] = int(poll)

    def _forget(self, key: str) -> None:
        del self._told[key]
        self._store.pop(key)


def _key(sender: KVSender) -> str:
    return f"{sender.room}/{sender.attempt}"
