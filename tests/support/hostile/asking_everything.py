"""One of eight callers, in a process of its own: asks a rank for everything, as much as it may, until its input ends.

``python -m tests.support.hostile.asking_everything NAME RANK CACHE INDEX``, all addresses. Says "asks" once it does,
and in the end how many calls of each method ended how.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections import Counter, defaultdict
from functools import partial
from typing import Any

import grpc
from google.protobuf import json_format

from kvgrpc.v1 import pull_service_pb2
from kvgrpc.v1.server_service_pb2 import GetServerInfoRequest
from kvgrpc.v1.server_service_pb2_grpc import ServerServiceStub
from tests.support.hostile.largest import CACHE, INDEX, PULL, largest, said
from tests.support.secrets import bearer

AT_ONCE = 2
# Shorter than they ask: a call that has not had its turns by then ends, and is known to have been asked.
CALL_SECONDS = 10
STREAMS_OF_ANSWERS = ("/Watch", "/WatchEngines", "/WatchOperations")
# What a watch sends after its state is news, for which nobody waits here.
WATCHED_SECONDS = 1.0
UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))


class Caller:
    def __init__(self, name: str, rank: str, cache: str, index: str, identity: str) -> None:
        self._name = name
        self._of_caches, self._of_indexes = cache, index
        self._rank = rank
        self._channels = {address: grpc.insecure_channel(address, UNLIMITED) for address in (rank, cache, index)}
        page_identity = json_format.Parse(identity, pull_service_pb2.PageIdentity())
        self._requests = {
            path: [each.SerializeToString() for each in requests]
            for path, requests in largest(name, page_identity).items()
        }
        to = ServerServiceStub(self._channels[rank]).GetServerInfo(
            GetServerInfoRequest(), metadata=self._proof(rank), timeout=60
        )
        self._said = said(name, to.rank)
        self._ended: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._asked: Counter[str] = Counter()
        self._over = False

    def ask(self) -> None:
        for path in self._requests:
            for _ in range(AT_ONCE):
                if path.endswith(STREAMS_OF_ANSWERS):
                    threading.Thread(target=self._watch_on, args=(path,), daemon=True).start()
                else:
                    self._call(path)
        for path in self._said:
            threading.Thread(target=self._speak_on, args=(path,), daemon=True).start()

    def end(self) -> dict[str, dict[str, int]]:
        self._over = True
        return {path: dict(codes) for path, codes in self._ended.items()}

    def _call(self, path: str) -> None:
        """Again and again, whatever the answer is."""
        address = self._address(path)
        call: Any = self._channels[address].unary_unary(path)
        future = call.future(self._next(path), metadata=self._proof(address), timeout=CALL_SECONDS)
        future.add_done_callback(partial(self._go_on, path))

    def _go_on(self, path: str, done: Any) -> None:
        self._note(path, done.code())
        if not self._over:
            self._call(path)

    def _watch_on(self, path: str) -> None:
        address = self._address(path)
        while not self._over:
            watch: Any = self._channels[address].unary_stream(path)
            call = watch(self._next(path), metadata=self._proof(address), timeout=WATCHED_SECONDS)
            self._read(path, call, lambda: None)

    def _speak_on(self, path: str) -> None:
        address, number = self._address(path), 0
        while not self._over:
            number += 1
            requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            messages = (each.SerializeToString() for each in self._said[path](number))
            requests.put(next(messages))

            def answer() -> None:
                requests.put(next(messages, None))  # noqa: B023

            stream: Any = self._channels[address].stream_stream(path)
            call = stream(iter(requests.get, None), metadata=self._proof(address), timeout=CALL_SECONDS)
            self._read(path, call, answer)
            requests.put(None)

    def _read(self, path: str, call: Any, answer: Any) -> None:
        try:
            for _ in call:
                answer()
        except grpc.RpcError:
            pass
        self._note(path, call.code())

    def _next(self, path: str) -> bytes:
        self._asked[path] += 1
        requests = self._requests[path]
        return requests[self._asked[path] % len(requests)]

    def _note(self, path: str, code: grpc.StatusCode) -> None:
        self._ended[path][code.name] += 1

    def _address(self, path: str) -> str:
        if path.startswith((CACHE, PULL)):
            return self._of_caches
        return self._of_indexes if path.startswith(INDEX) else self._rank

    def _proof(self, address: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", bearer(self._name, address)),)


def main() -> None:
    caller = Caller(*sys.argv[1:])
    caller.ask()
    print("asks", flush=True)
    sys.stdin.read()
    print(json.dumps(caller.end()), flush=True)


if __name__ == "__main__":
    main()
