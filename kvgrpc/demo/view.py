"""Shows the demo: tokens as they come on a terminal, lines in a pipe, one object with ``--json``."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from kvgrpc.demo.prompts import ANSWER_TOKENS
from kvgrpc.demo.results import CacheResult, DemoResult, PromptResult, PullResult

PIPE_WIDTH = 160
REDRAWN_PER_SECOND = 12


class DemoView:
    """For people, on stdout. A terminal gets a live display while it is open as a context; a pipe gets lines."""

    def __init__(self) -> None:
        terminal = sys.stdout.isatty()
        self._console = Console(highlight=False, width=None if terminal else PIPE_WIDTH)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(24), MofNCompleteColumn(), console=self._console
        )
        self._prompts: Sequence[PromptResult] = ()
        self._tasks = {
            name: self._progress.add_task(name, total=None, visible=False)
            for name in ("tokens from decode", "tokens from the single process")
        }
        self._live = Live(console=self._console, refresh_per_second=REDRAWN_PER_SECOND, get_renderable=self._render)
        self._terminal = terminal

    def __enter__(self) -> DemoView:
        if self._terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        """A step that was done."""
        self._console.print(Text(text, style="dim"))

    def warn(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"), soft_wrap=True)

    def follow(self, prompts: Sequence[PromptResult]) -> None:
        """These will be answered from now on."""
        self._prompts = prompts
        for task in self._tasks.values():
            self._progress.update(task, total=len(prompts) * ANSWER_TOKENS)

    def changed(self, prompt: PromptResult) -> None:
        """A prompt got on."""
        counts = (
            sum(len(each.tokens) for each in self._prompts),
            sum(len(each.reference_tokens) for each in self._prompts),
        )
        for task, count in zip(self._tasks.values(), counts, strict=True):
            self._progress.update(task, completed=count, visible=count > 0)
        if not self._terminal and prompt.finished and not prompt.reference_tokens:
            self._console.print(f"answer to {prompt.prompt.title!r}: {_words(prompt.tokens)}", soft_wrap=True)

    def result(self, result: DemoResult) -> None:
        """The tables."""
        if result.prompts:
            self._console.print(_prompt_table(result))
        if result.events:
            self._console.print(_event_table(result))
        if result.cache is not None:
            self._console.print(_cache_table(result.cache))
        if result.pull is not None:
            self._console.print(_pull_table(result.pull))

    def servers(self, result: DemoResult) -> None:
        """Says how to look at the servers that were left running."""
        self._console.print("\nThe servers stay up until Ctrl-C. Look at them from another terminal:", style="bold")
        for what, lines in commands(result).items():
            self._console.print(Text(what, style="dim"))
            for command in lines:
                self._console.print(f"  {command}", soft_wrap=True)
        self._console.print("Or with grpcurl, which needs nothing of kvgrpc:", style="bold")
        for command in grpcurl_commands(result):
            self._console.print(f"  {command}", soft_wrap=True)

    def last(self, result: DemoResult) -> None:
        """The last line."""
        self._console.print(
            Text(result.summary, style="bold red" if result.difference else "bold green"), soft_wrap=True
        )

    def _render(self) -> Group:
        table = Table(box=None, show_header=False)
        for prompt in self._prompts:
            table.add_row(prompt.prompt.title, _state(prompt), Text(_words(prompt.tokens), style="cyan"))
        return Group(table, self._progress)


class JsonView(DemoView):
    """For programs: nothing on stdout but one object."""

    def __init__(self) -> None:
        super().__init__()
        self._terminal = False
        self._console = Console(stderr=True, highlight=False)

    def note(self, text: str) -> None:
        """Not said."""

    def changed(self, prompt: PromptResult) -> None:
        """Not said."""

    def result(self, result: DemoResult) -> None:
        print(json.dumps(result.as_json()), flush=True)

    def last(self, result: DemoResult) -> None:
        """It is in the object."""


def commands(result: DemoResult) -> dict[str, list[str]]:
    """Our own commands that show every table of the running demo, by what they look at."""
    kvgrpc, registry = program(), result.addresses["registry"]
    fleet = ("engines", "ranks", "top", "rooms --slowest --fleet", "caches", "pulls --fleet")
    found = {"all ranks, at their registry": [f"{kvgrpc} {table} -s {registry}" for table in fleet]}
    if result.page:
        found[f"the same in the browser: http://{result.page}/"] = []
    else:
        found["the same in the browser"] = [f"{kvgrpc} view -s {registry}"]
    tables = ("info", "sessions", "rooms", "streams", "events replay")
    for kind in ("prefill", "decode"):
        found[f"one of them: {kind}"] = [f"{kvgrpc} {table} -s {result.addresses[kind]}" for table in tables]
    decode = result.addresses["decode"]
    found["the cache behind decode, with its prefetches; prefill has none"] = [
        f"{kvgrpc} cache info -s {decode}",
        f"{kvgrpc} prefetch list -s {decode}",
    ]
    return found


def program() -> str:
    """Returns how the command ``kvgrpc`` is called here, from another terminal in the same folder."""
    called = sys.argv[0]
    if Path(called).name != "kvgrpc":
        return f"{shlex.quote(sys.executable)} -m kvgrpc"
    found = shutil.which("kvgrpc")
    return "kvgrpc" if found and Path(found).absolute() == Path(called).absolute() else shlex.quote(called)


def grpcurl_commands(result: DemoResult) -> list[str]:
    """Returns the calls of grpcurl that show the same of the servers, by what they show."""
    grpcurl = "grpcurl -plaintext"
    registry = result.addresses["registry"]
    found = [f"{grpcurl} {registry} list", f"{grpcurl} {registry} kvgrpc.v1.RegistryService/ListEngines"]
    for kind in ("prefill", "decode"):
        address = result.addresses[kind]
        found.append(f"{grpcurl} {address} list")
        found += [
            f"{grpcurl} {address} kvgrpc.v1.{method}"
            for method in ("TransferService/ListSessions", "TransferService/ListRooms", "EventService/ListStreams")
        ]
    return found


def _prompt_table(result: DemoResult) -> Table:
    table = Table(title=f"Hand-offs over {result.data_plane}", title_justify="left", title_style="bold")
    table.add_column("prompt")
    for column in ("tokens", "pages moved", "reused P/D", "bytes", "prefill", "hand-off", "first token"):
        table.add_column(column, justify="right")
    table.add_column("answer, cache")
    for prompt in result.prompts:
        equal = Text(prompt.difference, style="red") if prompt.difference else Text("equal", style="green")
        table.add_row(
            prompt.prompt.title,
            str(len(prompt.prompt.tokens)),
            str(prompt.pages_moved),
            f"{prompt.reused_by_prefill}/{prompt.reused_by_decode}",
            f"{prompt.pages_moved * result.page_bytes:,}",
            f"{prompt.compute_seconds * 1000:.0f} ms",
            "-" if prompt.handoff_seconds is None else f"{prompt.handoff_seconds * 1000:.1f} ms",
            "-" if prompt.first_token_seconds is None else f"{prompt.first_token_seconds * 1000:.0f} ms",
            equal,
        )
    rate = f"{result.gigabytes_per_second:.2f} GB/s while writing"
    pages = sum(prompt.pages_moved for prompt in result.prompts)
    table.add_section()
    table.add_row("together", "", str(pages), "", f"{result.written_bytes:,}", "", rate, "", "")
    return table


def _event_table(result: DemoResult) -> Table:
    table = Table(title="KV events: live over ZMQ PUB, replayed over gRPC", title_justify="left", title_style="bold")
    table.add_column("stream")
    for column in ("batches", "bytes", "pages stored", "removed"):
        table.add_column(column, justify="right")
    table.add_column("replay")
    for stream in result.events:
        equal = Text(stream.difference, style="red") if stream.difference else Text("equal", style="green")
        counts = (stream.batches, stream.nbytes, stream.stored, stream.removed)
        table.add_row(stream.engine, *(f"{count:,}" for count in counts), equal)
    return table


def _cache_table(cache: CacheResult) -> Table:
    table = Table(
        title=f"Through storage ({cache.storage}) and back: {cache.title!r}",
        title_justify="left",
        title_style="bold",
        show_header=True,
    )
    table.add_column("step")
    for column in ("pages", "bytes", "time", "rate"):
        table.add_column(column, justify="right")
    size = cache.nbytes // max(1, cache.stored_pages)
    steps = (
        ("device to host", cache.pages, cache.copy_seconds),
        ("host to storage", cache.stored_pages, cache.store_seconds),
        ("dropped from device and host", cache.pages - cache.found_after[1], 0.0),
        (f"found in storage, {cache.hit_rate:.0%} of the prompt's {cache.asked_pages}", cache.found_after[2], 0.0),
        ("storage to host, ordered over gRPC", cache.prefetched_pages, cache.prefetch_seconds),
        ("host to device layer by layer, to the first token", cache.loaded_pages, cache.first_token_seconds),
    )
    for step, pages, seconds in steps:
        computes = step.endswith("first token")
        rate = f"{pages * size / seconds / 1e9:.2f} GB/s" if seconds and not computes else ""
        table.add_row(step, str(pages), f"{pages * size:,}", f"{seconds * 1000:.1f} ms" if seconds else "", rate)
    table.add_section()
    equal = Text(cache.difference, style="red") if cache.difference else Text("the same tokens", style="green")
    table.add_row(f"answered again, {cache.reused_pages} pages reused", "", "", "", equal)
    return table


def _pull_table(pull: PullResult) -> Table:
    title = "Pulled, not computed: a second decode answers it with the first one's pages"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("step")
    for column in ("pages", "bytes", "time", "rate"):
        table.add_column(column, justify="right")
    rate = f"{pull.nbytes / pull.pull_seconds / 1e9:.2f} GB/s" if pull.pull_seconds else ""
    asked = f"{pull.pull_seconds * 1000:.1f} ms"
    table.add_row("host to host, ordered over gRPC", str(pull.pulled_pages), f"{pull.nbytes:,}", asked, rate)
    first = f"{pull.first_token_seconds * 1000:.1f} ms"
    table.add_row("host to device layer by layer, to the first token", str(pull.pulled_pages), "", first, "")
    table.add_section()
    equal = Text(pull.difference, style="red") if pull.difference else Text("the same tokens", style="green")
    table.add_row(f"answered again, {pull.reused_pages} pages reused", "", "", "", equal)
    return table


def _state(prompt: PromptResult) -> Text:
    if prompt.failure:
        return Text("failed", style="red")
    if prompt.finished:
        return Text("answered", style="green")
    if prompt.tokens:
        return Text("decoding", style="cyan")
    if prompt.asked_at:
        return Text(f"prefill and hand-off {time.monotonic() - prompt.asked_at:4.1f} s", style="yellow")
    return Text("waits", style="dim")


def _words(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))
