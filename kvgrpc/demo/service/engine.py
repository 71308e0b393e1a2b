"""A prefill or a decode of the demo as a service: what a router asks over HTTP becomes a request of its scheduler."""

from __future__ import annotations

import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvgrpc.dataplane import open_plane
from kvgrpc.demo.engine.config import DECODE, PREFILL, EngineConfig
from kvgrpc.demo.processes.child import RouterGone
from kvgrpc.demo.processes.decode import DecodeScheduler
from kvgrpc.demo.processes.prefill import PrefillScheduler
from kvgrpc.demo.processes.rank import POLL_SECONDS, DemoScheduler, EngineRank, close, open_engine, work
from kvgrpc.demo.protocol import AnswerToken, Compute, Finished, Open, Prefilled, RoomFailed, ToProcess, ToRouter
from kvgrpc.demo.service.questions import ANSWER_SECONDS, GenerateAnswer, GenerateRequest, GenerateServer, NotAnswered
from kvgrpc.errors import InvalidRequest
from kvgrpc.model import Role
from kvgrpc.net import split
from kvgrpc.server import settings

# After SIGTERM, for what was asked before it.
FINISH_SECONDS = 20.0
_PARTS: dict[str, tuple[Role, EngineConfig, Callable[[EngineRank], DemoScheduler]]] = {
    "prefill": (Role.PREFILL, PREFILL, PrefillScheduler),
    "decode": (Role.DECODE, DECODE, DecodeScheduler),
}


def serve(name: str, listen: str) -> None:
    """For the main thread of a process: until SIGTERM or SIGINT, and until what was asked before is answered.

    Raises KvGrpcError where the rank cannot be opened as its settings say.
    """
    role, config, scheduler = _PARTS[name]
    rank: dict[str, Any] = {"role": role, "engine": name, "registry": "", "data_plane": "mooncake"} | settings()
    if not rank["registry"]:
        raise InvalidRequest.of("registry", "", "HOST:PORT of a registry, in KVGRPC_REGISTRY")
    asked = AskedOverHttp(f"{rank['registry']}/prefill")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.finish())
    plane = open_plane(rank.pop("data_plane"), host=_host(rank))
    engine = open_engine(config, asked, plane, Open("", rank["registry"]), **rank)
    try:
        _answer(name, listen, asked, engine, scheduler(engine))
    finally:
        close(engine)


def _answer(name: str, listen: str, asked: AskedOverHttp, engine: EngineRank, scheduler: DemoScheduler) -> None:
    server = GenerateServer(listen, asked.ask, lambda: True)
    print(f"{name} at http://{server.address}, its rank at {engine.rank.address}", flush=True)
    try:
        with suppress(RouterGone):
            work(engine, scheduler)
    finally:
        asked.give_up()
        server.close()


def _host(rank: Mapping[str, Any]) -> str:
    """The address by which peers reach this process, which a data plane wants as a number."""
    return socket.gethostbyname(split(rank.get("advertise") or rank.get("listen", "127.0.0.1:0"))[0])


@dataclass(slots=True)
class _Asked:
    """One question on its way: its tokens so far, and its end."""

    tokens: list[int] = field(default_factory=list)
    failure: str = ""
    ended: threading.Event = field(default_factory=threading.Event)


class AskedOverHttp:
    """The channel between the threads that hear questions and the one that owns the engine."""

    def __init__(self, prefill: str) -> None:
        self._prefill = prefill
        self._rooms: dict[int, _Asked] = {}
        self._lock = threading.Lock()
        # None wakes the engine, and says nothing.
        self._questions: queue.SimpleQueue[Compute | None] = queue.SimpleQueue()
        self._end_at: float | None = None

    def ask(self, question: GenerateRequest) -> GenerateAnswer:
        """The answer, on the thread that heard the question. Raises NotAnswered."""
        room, asked = question.room, _Asked()
        with self._lock:
            if self._end_at is not None:
                raise NotAnswered(503, "this engine is ending")
            if not room or room in self._rooms:
                raise NotAnswered(400, "each question has a room of its own, from 1 to 2^63 - 1")
            self._rooms[room] = asked
        self._questions.put(Compute(room, self._prefill, question.prompt_tokens(), question.tokens))
        answered = asked.ended.wait(ANSWER_SECONDS)
        with self._lock:
            del self._rooms[room]
        return GenerateAnswer(
            room, asked.tokens, asked.failure if answered else f"no answer within {ANSWER_SECONDS:g} s"
        )

    def finish(self) -> None:
        """Takes no question any more; the engine ends once those before have their answers. From a signal handler."""
        self._end_at = time.monotonic() + FINISH_SECONDS
        self._questions.put(None)

    def give_up(self) -> None:
        """Nothing computes any more: what is still asked has failed."""
        with self._lock:
            self._end_at = self._end_at or time.monotonic()
            for asked in self._rooms.values():
                asked.failure = asked.failure or "this engine has ended"
                asked.ended.set()

    def receive(self, seconds: float | None = None) -> ToProcess | None:
        """The next question, for the engine's thread; None when none came within ``seconds``. Raises RouterGone."""
        if self._end_at is not None:
            if not self._rooms or time.monotonic() > self._end_at:
                raise RouterGone
            seconds = POLL_SECONDS if seconds is None else seconds
        try:
            return self._questions.get(timeout=seconds) if seconds != 0 else self._questions.get_nowait()
        except queue.Empty:
            return None

    def tell(self, message: ToRouter) -> None:
        """Returns what the engine says of a room."""
        if not isinstance(message, (AnswerToken, Finished, Prefilled, RoomFailed)):
            return
        with self._lock:
            asked = self._rooms.get(message.room)
        if asked is None:  # it took too long, and nobody waits
            return
        if isinstance(message, AnswerToken):
            asked.tokens.append(message.token)
            return
        if isinstance(message, RoomFailed):
            asked.failure = f"{message.reason}: {message.message}"
        asked.ended.set()
