"""``kvgrpc demo``: one real hand-off after the other, from prompt to tokens, each compared with a single process.

This process is the router: it starts the others, sends the prompts, and believes nothing that it did not compare.
"""

from __future__ import annotations

import importlib.util
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kvgrpc.client import SyncClient
from kvgrpc.demo.engine.config import PREFILL
from kvgrpc.demo.event_check import EventCheck
from kvgrpc.demo.launch import DemoFailed, Processes
from kvgrpc.demo.prompts import ANSWER_TOKENS, PromptsInvalid, built_in, from_file
from kvgrpc.demo.protocol import (
    ClearCache,
    Compute,
    Loaded,
    Offload,
    Offloaded,
    Open,
    Opened,
    Refused,
    Report,
    Reported,
    Resume,
    Resumed,
    ToRouter,
)
from kvgrpc.demo.results import CacheResult, DemoResult, PromptResult, PullResult, note
from kvgrpc.demo.view import DemoView, JsonView
from kvgrpc.errors import KvGrpcError, Reason
from kvgrpc.prefetch.storage.mooncake.local import LocalStore
from kvgrpc.v1 import prefetch_service_pb2

if importlib.util.find_spec("torch") is None:  # this process needs none, but those that it starts do
    raise ModuleNotFoundError("No module named 'torch'", name="torch")

RANKS = ("prefill", "decode")
TAKER = "decode-2"
KINDS = ("registry", *RANKS, TAKER, "reference")
# Importing torch takes seconds, and much longer the first time on a cold disk.
LOAD_SECONDS = 120.0
OPEN_SECONDS = 60.0
ANSWER_SECONDS = 60.0
REPORT_SECONDS = 10.0
IN_FLIGHT = 3
STORE_BYTES = 256 << 20
INTERRUPTED = 130
# Serves a page of the ranks at the registry of this address while it is entered; the page's address.
Page = Callable[[str], AbstractContextManager[str]]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """``data_plane``: "mooncake", "shm", or None: Mooncake, and shm where it cannot load. ``storage``: "file", or
    "mooncake": a Store of its own, whose owner lends memory."""

    data_plane: str | None = None
    storage: str = "file"
    prompts: Path | None = None
    as_json: bool = False
    keep_running: bool = False


def run(options: DemoOptions, page: Page | None = None) -> int:
    """Runs the demo and returns the exit code: 0 when everything was equal, 1 when not, 130 after Ctrl-C.

    ``page``: serves a page of the ranks at a registry, meanwhile and while the servers stay up.

    For the main thread of a process. SIGTERM ends it as Ctrl-C does, and its processes and its files with it.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    view = JsonView() if options.as_json else DemoView()
    result = DemoResult(options.data_plane or "mooncake")
    began = time.monotonic()
    shown = False
    try:
        asked = built_in() if options.prompts is None else from_file(options.prompts)
        result.prompts = [PromptResult(prompt, room) for prompt, room in zip(asked, _rooms(len(asked)), strict=True)]
        with _storage(options.storage) as storage, Processes(KINDS) as processes, ExitStack() as pages:
            with view:
                demo = _Demo(options, processes, view, result, storage)
                demo.open(began)
                if page is not None:
                    result.page = pages.enter_context(page(result.addresses["registry"]))
                    view.note(f"the fleet in the browser: http://{result.page}/")
                demo.run()
            result.seconds = time.monotonic() - began
            view.result(result)
            shown = True
            if options.keep_running:
                view.last(result)
                with suppress(KeyboardInterrupt):  # from the first hint on: nothing is interrupted any more
                    view.servers(result)
                    _stay(processes)
    except (DemoFailed, PromptsInvalid, KvGrpcError) as error:
        result.problem = str(error)
        if shown and options.as_json:
            view.warn(result.problem)  # one object is all that programs read
        elif options.as_json:
            result.seconds = time.monotonic() - began
            view.result(result)
    except KeyboardInterrupt:
        view.warn("interrupted")
        return INTERRUPTED
    view.last(result)
    return 1 if result.difference else 0


class _Demo:
    """The steps, one after the other. Every message of the processes comes through ``_until``."""

    def __init__(
        self, options: DemoOptions, processes: Processes, view: DemoView, result: DemoResult, storage: dict[str, str]
    ) -> None:
        self._options = options
        self._processes = processes
        self._view = view
        self._result = result
        self._by_room = {prompt.room: prompt for prompt in result.prompts}
        self._loaded: set[str] = set()
        self._opened: dict[str, Opened] = {}
        self._refused: dict[str, Refused] = {}
        self._reports: dict[str, Reported] = {}
        self._storage = storage
        self._offloaded: Offloaded | None = None
        self._resumed: dict[str, Resumed] = {}

    def open(self, began: float) -> None:
        """Until a prefill and a decode are open. ``began``: moment of the start. Raises DemoFailed."""
        self._open()
        self._result.set_up_seconds = time.monotonic() - began

    def run(self) -> None:
        """Fills the result. Raises DemoFailed where a step cannot be done at all."""
        with ExitStack() as stack:
            checks = {rank: self._follow_events(rank, stack) for rank in RANKS}
            self._answer()
            self._answer_in_one_process()
            self._ask_for_reports()
            self._result.events = [check.result(self._reports[rank].cached) for rank, check in checks.items()]
        self._through_storage()

    def _open(self) -> None:
        self._view.note("starting a registry, a prefill, a decode and a reference process; torch takes seconds to load")
        self._until(lambda: "registry" in self._opened and self._loaded.issuperset(RANKS), LOAD_SECONDS, "to load")
        self._open_ranks()
        if self._refused and self._options.data_plane is None and self._may_do_without_mooncake():
            self._view.warn(f"{self._refused[RANKS[0]].message}; until then the demo runs over shm")
            self._result.data_plane = "shm"
            self._open_ranks()
        for rank in sorted(self._refused, key=RANKS.index):
            refusal = self._refused[rank]
            raise DemoFailed(f"{rank} cannot open {self._result.data_plane}: {refusal.reason}: {refusal.message}")
        self._result.addresses = {kind: opened.address for kind, opened in self._opened.items()}
        self._result.page_bytes = self._opened["prefill"].page_bytes
        self._view.note(", ".join(f"{kind} at {address}" for kind, address in self._result.addresses.items()))

    def _open_ranks(self) -> None:
        self._refused.clear()
        for rank in RANKS:
            has_tiers = rank == "decode"
            storage = self._options.storage if has_tiers else ""
            registry = self._opened["registry"].address
            self._processes.tell(rank, Open(self._result.data_plane, registry, storage, self._storage, has_tiers))
        self._until(lambda: (self._opened.keys() | self._refused.keys()).issuperset(RANKS), OPEN_SECONDS, "to open")

    def _may_do_without_mooncake(self) -> bool:
        return self._refused.keys() == set(RANKS) and all(
            refusal.reason == Reason.FEATURE_DISABLED.name for refusal in self._refused.values()
        )

    def _follow_events(self, rank: str, stack: ExitStack) -> EventCheck:
        check = EventCheck(self._opened[rank].address, lambda: self._processes.tell(rank, ClearCache()))
        stack.callback(check.close)
        return check

    def _answer(self) -> None:
        """Prompts in order, some in flight at once; a next turn waits for the answer before it."""
        prompts = self._result.prompts
        self._view.follow(prompts)
        for prompt in prompts:
            self._until(lambda prompt=prompt: self._may_ask(prompt), ANSWER_SECONDS, "to answer")  # type: ignore[misc]
            prompt.asked_at = time.monotonic()
            request = self._request(prompt)
            for rank in RANKS:
                self._processes.tell(rank, request)
        self._until(lambda: all(prompt.ended for prompt in prompts), ANSWER_SECONDS, "to answer")

    def _may_ask(self, prompt: PromptResult) -> bool:
        asked = [each for each in self._result.prompts if each.asked_at]
        after = prompt.prompt.after
        in_flight = sum(not each.ended for each in asked)
        return in_flight < IN_FLIGHT and (after is None or self._result.prompts[after].ended)

    def _answer_in_one_process(self) -> None:
        self._view.note("computing the same prompts in one process, without kvgrpc and without a prefix cache")
        self._until(lambda: "reference" in self._loaded, LOAD_SECONDS, "to load")
        for prompt in self._result.prompts:
            self._processes.tell("reference", self._request(prompt))
        for prompt in self._result.prompts:
            self._until(lambda prompt=prompt: prompt.reference_finished, ANSWER_SECONDS, "to answer")  # type: ignore[misc]

    def _ask_for_reports(self) -> None:
        for rank in RANKS:
            self._processes.tell(rank, Report())
        self._until(lambda: self._reports.keys() == set(RANKS), REPORT_SECONDS, "to report")
        self._result.written_bytes = self._reports["prefill"].written_bytes
        self._result.writing_seconds = self._reports["prefill"].writing_seconds

    def _through_storage(self) -> None:
        """The longest conversation leaves device and host, and comes back from storage on the order of a remote
        client."""
        asked = max(self._result.prompts, key=lambda each: len(each.prompt.tokens))
        prompt = list(asked.prompt.tokens)
        if asked.failure or len(prompt) <= PREFILL.chunk_tokens:
            return
        self._view.note("moving a finished conversation to storage, and back over PrefetchService")
        cache = self._result.cache = CacheResult(asked.prompt.title, asked.tokens, storage=self._options.storage)
        self._processes.tell("decode", Offload(prompt))
        self._until(lambda: self._offloaded is not None, ANSWER_SECONDS, "to offload")
        assert self._offloaded is not None
        cache.pages, cache.stored_pages = self._offloaded.pages, self._offloaded.stored_pages
        cache.nbytes = self._offloaded.nbytes
        cache.copy_seconds, cache.store_seconds = self._offloaded.copy_seconds, self._offloaded.store_seconds
        with SyncClient(self._opened["decode"].address) as client:
            _prefetch(client, prompt, cache)
        self._from_another_engine(prompt, cache)
        resumed = self._resume("decode", prompt)
        cache.tokens, cache.loaded_pages = resumed.tokens, resumed.loaded_pages
        cache.reused_pages = resumed.reused_pages
        cache.first_token_seconds = resumed.first_token_seconds

    def _from_another_engine(self, prompt: list[int], cache: CacheResult) -> None:
        """A second decode takes the pages that the first one has on its host now, and answers with them."""
        self._view.note("a second decode takes the same pages from the first one's host cache")
        self._until(lambda: TAKER in self._loaded, LOAD_SECONDS, "to load")
        registry = self._opened["registry"].address
        self._processes.tell(TAKER, Open(self._result.data_plane, registry, pulls=True))
        self._until(lambda: TAKER in self._opened or TAKER in self._refused, OPEN_SECONDS, "to open")
        if TAKER in self._refused:
            raise DemoFailed(f"{TAKER} cannot open: {self._refused[TAKER].message}")
        address = self._result.addresses[TAKER] = self._opened[TAKER].address
        pull = self._result.pull = PullResult(cache.first_tokens, cache.prefetched_pages)
        with SyncClient(address) as client:
            _pull(client, prompt, pull)
        pull.nbytes = pull.pulled_pages * self._result.page_bytes
        resumed = self._resume(TAKER, prompt)
        pull.tokens, pull.reused_pages = resumed.tokens, resumed.reused_pages
        pull.first_token_seconds = resumed.first_token_seconds

    def _resume(self, rank: str, prompt: list[int]) -> Resumed:
        self._processes.tell(rank, Resume(prompt, ANSWER_TOKENS))
        self._until(lambda: rank in self._resumed, ANSWER_SECONDS, "to answer again")
        return self._resumed[rank]

    def _request(self, prompt: PromptResult) -> Compute:
        bootstrap_addr = f"{self._opened['registry'].address}/prefill"
        return Compute(prompt.room, bootstrap_addr, list(prompt.prompt.tokens), ANSWER_TOKENS)

    def _until(self, reached: Callable[[], bool], seconds: float, what: str) -> None:
        """Handles what the processes say until ``reached``. Raises DemoFailed after ``seconds`` without it."""
        deadline = time.monotonic() + seconds
        while not reached():
            heard = self._processes.receive(deadline)
            if heard is None:
                raise DemoFailed(f"waited {seconds:.0f} s for the processes {what}, in vain")
            self._handle(*heard)

    def _handle(self, kind: str, message: ToRouter) -> None:
        if isinstance(message, Loaded):
            self._loaded.add(kind)
        elif isinstance(message, Opened):
            self._opened[kind] = message
        elif isinstance(message, Refused):
            self._refused[kind] = message
        elif isinstance(message, Reported):
            self._reports[kind] = message
        elif isinstance(message, Offloaded):
            self._offloaded = message
        elif isinstance(message, Resumed):
            self._resumed[kind] = message
        else:
            prompt = self._by_room[message.room]
            note(prompt, kind, message)
            self._view.changed(prompt)


@contextmanager
def _storage(backend: str) -> Iterator[dict[str, str]]:
    """Config of a storage backend that lasts as long as the demo."""
    if backend == "file":
        with ExitStack() as stack:
            # One that came between its making and its being known would leave it behind.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                folder = stack.enter_context(TemporaryDirectory(prefix="kvgrpc-demo-"))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield {"path": folder}
    else:
        with LocalStore(owner_bytes=STORE_BYTES) as store:
            yield {"master": store.address}


def _prefetch(client: SyncClient, prompt: list[int], cache: CacheResult) -> None:
    """Prefetches, like a router that knows the next request."""
    pages = prefetch_service_pb2.PromptPages(tokens=prompt)
    found = client.lookup(pages)
    cache.asked_pages = found.asked_pages
    cache.found_after = (found.device_pages, found.host_pages, found.storage_pages)
    began = time.monotonic()
    operation = _prefetched(client, pages)
    cache.prefetch_seconds = time.monotonic() - began
    cache.prefetched_pages = operation.completed_pages


def _pull(client: SyncClient, prompt: list[int], pull: PullResult) -> None:
    """The same order, to an engine without storage: what comes, comes from other engines. It hears of them from the
    registry, so it is asked until it has."""
    pages = prefetch_service_pb2.PromptPages(tokens=prompt)
    deadline = time.monotonic() + ANSWER_SECONDS
    while client.lookup(pages).storage_pages < pull.pages and time.monotonic() < deadline:
        time.sleep(0.02)
    began = time.monotonic()
    operation = _prefetched(client, pages)
    pull.pull_seconds = time.monotonic() - began
    pull.pulled_pages = operation.completed_pages


def _prefetched(client: SyncClient, pages: prefetch_service_pb2.PromptPages) -> prefetch_service_pb2.CacheOperation:
    """The end of a prefetch."""
    operation = client.start_prefetch(pages)
    for message in client.watch_operations([operation.operation_id]):
        for each in message.operations:
            operation = each
    return operation


def _stay(processes: Processes) -> None:
    """Until Ctrl-C or SIGTERM, which are raised, or until a process ends by itself."""
    while True:
        processes.receive(time.monotonic() + 3600.0)


def _rooms(count: int) -> list[int]:
    """Numbers that a router would draw: 1 to 2^63 - 1, never the same twice."""
    first = secrets.randbelow(2**62) + 1
    return [first + number for number in range(count)]
