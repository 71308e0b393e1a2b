"""Real engines as a router sees them: start, generate, abort, kill, stop; and a pair of prefill and decode of SGLang.

vllm_engine.py has the same of vLLM.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engines.model import Case, Reference
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
LOCAL = "127.0.0.1"
PAGE = 16
REQUEST_SECONDS = 60.0
LEFT_IN_SHARED_MEMORY = ("psm_", "sem.mp-", "sgl", "vllm_")


class Request:
    """One request at one engine: its tokens so far, in how many messages they came, and how it ended. ``wait`` says
    False when it did not in time."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine = engine
        self.number = number
        self.sent = time.monotonic()
        self.first: float | None = None
        self.ended: float | None = None
        self.tokens: list[int] = []
        self.messages = 0
        self.cached = 0
        self.accepted = 0  # tokens of drafts that were the model's own (SGLang)
        self.error: str | None = None
        self.value: Any = None
        self._done = threading.Event()

    def wait(self, seconds: float = REQUEST_SECONDS) -> bool:
        return self._done.wait(seconds)

    def result(self, seconds: float = REQUEST_SECONDS) -> list[int]:
        """The tokens; raises AssertionError with the engine's log when it failed or did not end."""
        assert self.wait(seconds), f"request {self.number} did not end within {seconds:g} s\n{self.engine.log_tail()}"
        assert self.error is None, f"{self.engine.role}: {self.error}\n{self.engine.log_tail()}"
        return self.tokens

    def failure(self, seconds: float = REQUEST_SECONDS) -> str:
        """Why it failed; raises AssertionError when it did not."""
        assert self.wait(seconds), f"request {self.number} did not end within {seconds:g} s\n{self.engine.log_tail()}"
        assert self.error is not None, f"{self.engine.role} finished with {self.tokens}"
        return self.error

    def take(self, message: Mapping[str, Any]) -> None:
        if message.get("end"):
            self.ended, self.error, self.value = message["t"], message["error"], message.get("value")
            self._done.set()
        else:
            self.tokens, self.cached = message["tokens"], message.get("cached") or 0
            self.accepted = message.get("accepted") or 0
            self.messages += 1
            if self.tokens and self.first is None:
                self.first = message["t"]


class Engine:
    """One SGLang engine: a worker that leads a session of its own, and all processes that SGLang starts in it.

    Starting goes on in the background; ``wait_ready`` before the first request.
    """

    worker = "tests.engines.worker"
    python = sys.executable
    start_seconds = 400.0  # with three of them on two cores beside other work

    def __init__(
        self, role: str, folder: Path, arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        self.role = role
        self.began = time.monotonic()
        self.startup_seconds = 0.0
        self._numbers = itertools.count(1)
        self._requests: dict[int, Request] = {}
        self._ready, self._gone = threading.Event(), threading.Event()
        self._shared_memory: set[int] = set()
        self._log = tempfile.NamedTemporaryFile(prefix=f"{role}-", suffix=".log", dir=folder, delete=False)  # noqa: SIM115
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [self.python, "-m", self.worker, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=self.environment(folder, arguments, environment or {}),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
        self._send(arguments)
        threading.Thread(target=self._read, daemon=True).start()

    @staticmethod
    def environment(folder: Path, arguments: Mapping[str, Any], more: Mapping[str, str]) -> dict[str, str]:
        """Of its processes."""
        return _environment(folder, _processes(arguments), more)

    def wait_ready(self) -> Engine:
        while not self._ready.wait(0.1):
            if self._gone.is_set() or time.monotonic() > self.began + self.start_seconds:
                # The process that failed first says why; behind that stands what its end did to the others.
                raise AssertionError(f"{self.role} did not start\n{self.log_tail(200)}")
        self._note_shared_memory()
        return self

    def wait_gone(self, seconds: float) -> bool:
        return self._gone.wait(seconds)

    def generate(self, prompt: list[int], new_tokens: int, **extra: Any) -> Request:
        return self._ask("generate", ids=prompt, n=new_tokens, extra=extra)

    def generate_at(self, replica: int, prompt: list[int], new_tokens: int, **extra: Any) -> Request:
        """At the data-parallel replica of the router's choice (vLLM)."""
        return self._ask("generate", ids=prompt, n=new_tokens, extra=extra, dp=replica)

    def generate_samples(self, prompt: list[int], new_tokens: int, samples: int, **extra: Any) -> Request:
        """Of one request; its ``value`` has the tokens of each, of vLLM with what it answered."""
        return self._ask("samples", ids=prompt, n=new_tokens, samples=samples, extra=extra)

    def abort(self, request: Request) -> None:
        self._send({"op": "abort", "id": request.number})

    def is_empty(self, seconds: float = 20.0, host: bool = False) -> bool:
        """Whether every page of the pool is free again once the prefix cache was emptied, within that time. ``host``:
        vLLM's host memory is emptied too; SGLang's always is."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            flushed, used = self._ask("flush", host=host), self._ask("used")
            flushed.result(10)
            used.result(10)
            if flushed.value and used.value == 0:
                return True
            time.sleep(0.2)
        return False

    @property
    def alive(self) -> bool:
        return not self._gone.is_set() and bool(self.pids())

    def kill(self) -> float:
        """kill -9 of all its processes; the moment of the first."""
        self._note_shared_memory()
        moment = time.monotonic()
        while (pids := self.pids()) and time.monotonic() < moment + 10:
            _signal(pids, signal.SIGKILL)
            time.sleep(0.01)
        self._process.wait(5)
        return moment

    def kill_stage(self, stage: int) -> float:
        """kill -9 of the processes of one pipeline stage; the moment of the first."""
        moment, found = time.monotonic(), self._of_stage(stage)
        _signal(found, signal.SIGKILL)
        return moment

    def stop_stage(self, stage: int) -> None:
        _signal(self._of_stage(stage), signal.SIGSTOP)

    def stop(self) -> float:
        moment = time.monotonic()
        _signal(self.pids(), signal.SIGSTOP)
        return moment

    def go_on(self) -> None:
        _signal(self.pids(), signal.SIGCONT)

    def close(self) -> None:
        if self._process.poll() is None:
            self.go_on()
            self._send({"op": "exit"})
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10 if self._ready.is_set() else 0.1)
        self.kill()
        self._socket.close()
        self._log.close()
        for entry in os.scandir("/dev/shm"):
            if entry.inode() in self._shared_memory and entry.name.startswith(LEFT_IN_SHARED_MEMORY):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def log_tail(self, lines: int = 30) -> str:
        return f"--- {self.role}\n" + "\n".join(self.log().splitlines()[-lines:])

    def pids(self) -> list[int]:
        """All processes of its session that live."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == self._process.pid and fields[0] not in "ZX":
                    found.append(int(pid))
        return found

    def _of_stage(self, stage: int) -> list[int]:
        """Processes of a pipeline stage say so in their titles."""
        title = re.compile(rf"PP{stage}(?!\d)")
        found = [pid for pid in self.pids() if title.search(_title(pid))]
        assert found, f"no process of stage {stage}: {[_title(pid) for pid in self.pids()]}"
        return found

    def _ask(self, operation: str, **arguments: Any) -> Request:
        request = Request(self, next(self._numbers))
        self._requests[request.number] = request
        self._send({"op": operation, "id": request.number, **arguments})
        return request

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendall((json.dumps(message) + "\n").encode())

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._socket.makefile("r"):
                message = json.loads(line)
                if "ready" in message:
                    self.startup_seconds = time.monotonic() - self.began
                    self._ready.set()
                else:
                    self._requests[message["id"]].take(message)
        self._gone.set()
        gone = {"end": True, "t": time.monotonic(), "error": f"the {self.role} engine is gone"}
        for request in list(self._requests.values()):
            if not request.wait(0):
                request.take(gone)

    def _note_shared_memory(self) -> None:
        """By inode: SIGKILL leaves it behind."""
        for pid in self.pids():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
                parts = (line.split() for line in maps)
                self._shared_memory.update(int(p[4]) for p in parts if len(p) > 5 and p[5].startswith("/dev/shm/"))


class Pair:
    """A prefill and a decode engine of one model, and requests to both, as a router sends them."""

    prefill: Engine
    decode: Engine
    sends_chunks = True  # of a prompt, each when it is computed
    prefill_engine: type[Engine] = Engine
    both_sides_at_once = True  # its routers ask so: what decode does not name after a loss was for the dead one

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        backend: str = "kvgrpc",
        tp: int = 1,
        environment: Mapping[str, str] | None = None,
        prefill_environment: Mapping[str, str] | None = None,
        prefill: Mapping[str, Any] | None = None,
        decode: Mapping[str, Any] | None = None,
    ) -> None:
        self._own_environment = {"prefill": prefill_environment or {}}
        common = {**engine_arguments(model, tp), "disaggregation_transfer_backend": backend}
        arguments = {
            "prefill": {**common, "chunked_prefill_size": 64, **(prefill or {})},
            "decode": {
                **common,
                "disaggregation_decode_retraction_backup": "none",  # the default one copies by kernels of CUDA
                **(decode or {}),
            },
        }
        self._open(folder, free_port(), arguments, environment or {})

    def _open(
        self, folder: Path, port: int, arguments: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str]
    ) -> None:
        self.bootstrap_port = port
        self._folder, self._arguments, self._environment = folder, arguments, environment
        self._rooms = random.Random(os.urandom(8))
        self.prefill, self.decode = self.start("prefill"), self.start("decode")

    def start(self, role: str, **more: Any) -> Engine:
        """One more engine of that role, on the port of the former for prefill; the caller waits and closes."""
        own = {
            "disaggregation_mode": role,
            "disaggregation_bootstrap_port": self.bootstrap_port,
            "port": free_port(),
        }
        environment = {**self._environment, **self._own_environment.get(role, {})}
        kind = self.prefill_engine if role == "prefill" else Engine
        return kind(role, self._folder, {**self._arguments[role], **own, **more}, environment)

    def start_decode_beside(self, **more: Any) -> Engine:
        """A second decode engine, ready; meanwhile the pair is stopped, because schedulers poll without a pause."""
        both = self.prefill, self.decode
        for engine in both:
            engine.stop()
        try:
            return self.start("decode", **more).wait_ready()
        finally:
            for engine in both:
                engine.go_on()

    def wait_ready(self) -> Pair:
        try:
            self.prefill.wait_ready()
            self.decode.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def restart(self, role: str) -> None:
        """After a kill: the same engine anew. The other side is left alone."""
        getattr(self, role).close()
        engine = self.start(role)
        setattr(self, role, engine)
        engine.wait_ready()

    def room(self) -> int:
        return self._rooms.randrange(1, 1 << 62)

    def submit(
        self, prompt: list[int], new_tokens: int, room: int | None = None, decode: Engine | None = None
    ) -> tuple[Request, Request]:
        """The request at prefill, and at decode."""
        return self._submit(prompt, prompt, new_tokens, room, decode)

    def submit_unseen(
        self, prompt: list[int], new_tokens: int, room: int | None = None, decode: Engine | None = None
    ) -> tuple[Request, Request]:
        """As ``submit``, but that decode is told ``another`` prompt."""
        return self._submit(prompt, another(prompt), new_tokens, room, decode)

    def _submit(
        self, prompt: list[int], told: list[int], new_tokens: int, room: int | None, decode: Engine | None
    ) -> tuple[Request, Request]:
        room = self.room() if room is None else room
        asked = self.submit_to_prefill(prompt, room)
        return asked, (decode or self.decode).generate(told, new_tokens, **self.at_decode(room))

    def submit_samples(self, prompt: list[int], new_tokens: int, samples: int, room: int) -> tuple[Request, Request]:
        """Parallel samples of one request, as a router sends them: the same body to both sides."""
        return (
            self.prefill.generate_samples(prompt, new_tokens, samples, **self.at_prefill(room)),
            self.decode.generate_samples(prompt, new_tokens, samples, **self.at_decode(room)),
        )

    def submit_to_prefill(self, prompt: list[int], room: int) -> Request:
        return self.prefill.generate(prompt, 1, **self.at_prefill(room))

    def submit_to_decode(self, prompt: list[int], new_tokens: int, room: int | None = None) -> Request:
        """A request that prefill never hears of: decode waits for it."""
        return self.decode.generate(prompt, new_tokens, **self.at_decode(self.room() if room is None else room))

    def number_of(self, room: int) -> int:
        """What kvgrpc calls the room."""
        return room

    def reason_of(self, request: Request | None, room: int) -> str:
        """Why it failed, as an operator finds it; "" where it did not."""
        return (request and request.error) or ""

    def check(self, reference: Reference, within: float = 0.0) -> None:
        """The pair serves a request, and its tokens are right, by what was handed over; again and again until then,
        counted from now."""
        end = time.monotonic() + within
        while True:
            case, room = reference.case(100), self.room()
            prefill, decode = self.submit_unseen(case.prompt, len(case.tokens), room)
            assert prefill.wait() and decode.wait(), f"{self.prefill.log_tail()}\n{self.decode.log_tail()}"
            if decode.error is None and prefill.error is None:
                assert (prefill.tokens, decode.tokens) == (case.tokens[:1], case.tokens)
                return
            assert time.monotonic() < end, self.reason_of(decode, room) + self.reason_of(prefill, room)

    def check_at_once(self, cases: Sequence[Case]) -> None:
        """All are asked at once: decode has the right tokens of each by what was handed over, and no side keeps a
        page."""
        halves = [self.submit_unseen(case.prompt, len(case.tokens)) for case in cases]
        assert [decode.result() for _, decode in halves] == [case.tokens for case in cases]
        assert self.prefill.is_empty() and self.decode.is_empty()

    def at_prefill(self, room: int) -> dict[str, Any]:
        """What a request says of its hand-off there."""
        return {"bootstrap_host": LOCAL, "bootstrap_port": self.bootstrap_port, "bootstrap_room": room}

    def at_decode(self, room: int) -> dict[str, Any]:
        return self.at_prefill(room)

    def close(self) -> None:
        threads = [threading.Thread(target=engine.close) for engine in (self.prefill, self.decode)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def another(prompt: list[int]) -> list[int]:
    """Another prompt with the same last token: an engine that is told it has the right tokens of ``prompt`` by pages
    that were handed over alone. Those of prompts that begin alike begin alike, so that an engine may hold them.
    """
    return [*(token ^ 1 for token in prompt[:-1]), prompt[-1]]


def engine_arguments(model: Path, tp: int) -> dict[str, Any]:
    """What lets SGLang run without a GPU, on the loopback, in a small pool."""
    return {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        "device": "cpu",
        "dtype": "float32",
        "tp_size": tp,
        "page_size": PAGE,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        # Of what is free when it starts: others that start meanwhile take some of it, and SGLang counts it as its own.
        "mem_fraction_static": 0.5,
        "max_running_requests": 8,
        "context_length": 512,
        "max_total_tokens": 4096,
        "host": LOCAL,
        "log_level": "info",
    }


def free_ports(count: int) -> int:
    """The first of so many, one behind the other."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind((LOCAL, port))
            return first


def _processes(arguments: Mapping[str, Any]) -> int:
    """Scheduler processes of an engine."""
    return math.prod(int(arguments.get(f"{axis}_size", 1)) for axis in ("tp", "dp", "pp"))


def common_environment(folder: Path, foreign: tuple[str, ...]) -> dict[str, str]:
    """What engines of both kinds need, and of ours all but ``foreign`` prefixes."""
    # PYTHONDONTWRITEBYTECODE would compile the engine anew at every start.
    unwanted = ("KVGRPC_", "PYTHONDONTWRITEBYTECODE", *foreign)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(unwanted)},
        **dict.fromkeys(("TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), str(folder)),
        **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "OMP_NUM_THREADS"), "1"),
        "GLOO_SOCKET_IFNAME": "lo",
        "KVGRPC_CHECK_PAGES": "1",
        "MOONCAKE_PROTOCOL": "tcp",
        "PYTHONPATH": str(ROOT),
    }


def _environment(folder: Path, processes: int, more: Mapping[str, str]) -> dict[str, str]:
    fixed = {
        **common_environment(folder, foreign=("SGLANG_",)),
        "SGLANG_HOST_IP": LOCAL,
        "SGLANG_NCCL_SO_PATH": "no-nccl.so",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",  # a page that leaks ends the engine
    }
    if processes > 1:  # a core a rank, else the ranks look for NUMA nodes
        cores = sorted(os.sched_getaffinity(0))
        fixed["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(processes))
    return {**fixed, **more}


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


SGLANG_PYTHON = ROOT / ".venv-sglang" / "bin" / "python"


class Sglang(Engine):
    """In its own environment, which is not that of this test."""

    python = str(SGLANG_PYTHON)
