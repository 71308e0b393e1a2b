"""One real SGLang engine in a session of its own: ``python -m tests.engines.worker FD``, started by engine.py only.

vllm_worker.py has the same of vLLM.

JSON lines on the inherited socket. In: the engine's arguments, then {"op": "generate", "id", "ids", "n", "extra"},
{"op": "abort", "id"}, {"op": "used", "id"}, {"op": "flush", "id"}, {"op": "exit"}. Out: {"ready": true}, {"id", "t",
"tokens", "cached", "accepted"} as tokens come, {"id", "t", "end": true, "error", "value"}. Times are CLOCK_MONOTONIC.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

MOST_ERROR_TEXT = 2000


class Worker:
    """Engines differ in ``_start`` to ``_flush``; these are SGLang's."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r")
        self._writing = threading.Lock()
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()

    def run(self) -> None:
        arguments = json.loads(self._lines.readline())
        threading.Thread(target=self._read, daemon=True).start()
        loop = self._start(arguments)
        self._loop = loop
        self._say(ready=True)
        loop.run_until_complete(self._stop.wait())
        self._engine.shutdown()

    def _read(self) -> None:
        for line in self._lines:
            message = json.loads(line)
            loop = self._loop
            if loop is None:
                break
            if message["op"] == "exit":
                loop.call_soon_threadsafe(self._stop.set)
                return
            if message["op"] == "abort":
                loop.call_soon_threadsafe(self._abort, str(message["id"]))
            else:
                asyncio.run_coroutine_threadsafe(self._handle(message), loop)

    async def _handle(self, message: dict[str, Any]) -> None:
        number, error, value = message["id"], None, None
        try:
            value = await getattr(self, "_" + message["op"])(message)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:MOST_ERROR_TEXT]
        self._say(id=number, t=time.monotonic(), end=True, error=error, value=value)

    def _start(self, arguments: dict[str, Any]) -> asyncio.AbstractEventLoop:
        import sglang

        self._engine = sglang.Engine(**arguments)
        loop: asyncio.AbstractEventLoop = self._engine.loop
        return loop

    def _abort(self, number: str) -> None:
        self._engine.tokenizer_manager.abort_request(number)

    async def _generate(self, message: dict[str, Any]) -> None:
        sampling = {"max_new_tokens": message["n"], "temperature": 0, "ignore_eos": True}
        stream = await self._engine.async_generate(
            input_ids=message["ids"], sampling_params=sampling, stream=True, rid=str(message["id"]), **message["extra"]
        )
        async for output in stream:
            about = output["meta_info"]
            reason = about.get("finish_reason") or {}
            if reason.get("type") == "abort":
                raise RuntimeError(reason.get("message"))
            self._say(
                id=message["id"],
                t=time.monotonic(),
                tokens=output["output_ids"],
                cached=about.get("cached_tokens"),
                accepted=about.get("spec_num_correct_drafts"),
            )

    async def _samples(self, message: dict[str, Any]) -> Any:
        """Tokens of each of several samples of one request."""
        number = {"n": message["samples"], "max_new_tokens": message["n"], "temperature": 0, "ignore_eos": True}
        outputs = await self._engine.async_generate(
            input_ids=message["ids"], sampling_params=number, **message["extra"]
        )
        return [output["output_ids"] for output in outputs]

    async def _used(self, message: dict[str, Any]) -> int:
        """Tokens of the pool that are neither free nor in the prefix cache."""
        loads = await self._engine.tokenizer_manager.get_loads()
        return sum(load.num_used_tokens + load.num_waiting_reqs + load.num_running_reqs for load in loads)

    async def _flush(self, message: dict[str, Any]) -> bool:
        """Empties the prefix cache; false while a request runs."""
        return bool((await self._engine.tokenizer_manager.flush_cache()).success)

    def _say(self, **message: Any) -> None:
        with self._writing:
            self._connection.sendall((json.dumps(message) + "\n").encode())


def watch(connection: socket.socket) -> None:
    """Kills this session once whoever started us is gone, or gives up: us, and the engine's children.

    A process of another session does it, which nobody stops when all of this one is stopped. PR_SET_PDEATHSIG would end
    us alone: the engine's processes have other parents. It ends with us, because whoever started us waits until
    the connection is closed, which it has too.
    """
    worker = os.getpid()
    ended = os.pidfd_open(worker)
    if child := os.fork():
        os.close(ended)
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork() == 0:
        gone = select.poll()
        gone.register(connection, 0)  # POLLHUP is always told
        gone.register(ended, select.POLLIN)
        if connection.fileno() in dict(gone.poll()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker, signal.SIGKILL)
    os._exit(0)


def main(kind: type[Worker]) -> None:
    inherited = socket.socket(fileno=int(sys.argv[1]))
    inherited.set_inheritable(False)
    watch(inherited)
    kind(inherited).run()


if __name__ == "__main__":
    main(Worker)
