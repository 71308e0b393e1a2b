"""What docs/images shows of running programs. ``.ci/pictures`` runs it; look at what it made before you commit that."""

from __future__ import annotations

import io
import itertools
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvgrpc.cli.view.command import page_of
from kvgrpc.client import SyncClient
from kvgrpc.server import RegistryServer
from tests.support.browser import Browser, browser
from tests.support.rank_host import RankProcess
from tests.support.waiting import wait_until

ALL = ("demo", "top", "view", "site")
COLUMNS, LINES = 150, 38
KVGRPC = f"{sys.executable} -m kvgrpc"
DEMO_SECONDS = 300.0
FRAME_SECONDS = 1.6
# A picture is to be looked at, not waited for.
MOST_FRAMES = 9
LOOKED_AT_SECONDS = 25.0
_MATRIX = re.compile(r'(<g transform="translate\(9, 41\)"[^>]*>)')
_STYLE = re.compile(r"\.(t-r\d+) \{([^}]*)\}")


class Terminal:
    """A program in a terminal of tmux's."""

    def __init__(self, command: str) -> None:
        self._name = f"pictures-{uuid.uuid4().hex[:8]}"
        size = ["-x", str(COLUMNS), "-y", str(LINES)]
        self._tmux("new-session", "-d", *size, f"export COLORTERM=truecolor TERM=xterm-256color; {command}; sleep 600")

    def shows(self) -> str:
        """The screen, with its colours."""
        return self._tmux("capture-pane", "-e", "-p").rstrip("\n")

    def types(self, key: str) -> None:
        self._tmux("send-keys", key)

    def end(self) -> None:
        self._tmux("send-keys", "C-c")
        time.sleep(1.0)  # for the program's own end; the next line is the end of it at the latest
        self._tmux("kill-server")

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-L", self._name, *words], capture_output=True, text=True, timeout=20)
        return done.stdout


@contextmanager
def terminal(command: str) -> Iterator[Terminal]:
    opened = Terminal(command)
    try:
        yield opened
    finally:
        opened.end()


def drawn(screen: str, title: str) -> str:
    """One screen as SVG."""
    console = Console(record=True, width=COLUMNS, height=LINES, file=io.StringIO())
    console.print(Text.from_ansi(screen), end="")
    return console.export_svg(title=title, unique_id="t")


def moving(screens: list[str], title: str) -> str:
    """Screens one after the other, as an SVG that moves by itself; who wants no motion sees the last one."""
    frames = [drawn(screen + "\n" * (LINES - screen.count("\n") - 1), title) for screen in screens]
    colours: dict[str, str] = {}
    parts = []
    for number, frame in enumerate(frames):
        part = _MATRIX.split(frame)[2].rpartition("</g>")[0]
        for name, style in _STYLE.findall(frame):
            part = part.replace(f'"{name}"', f'"{colours.setdefault(style, f"c{len(colours)}")}"')
        parts.append(f'<g class="f{number}">{part}</g>')
    rules = "".join(f".{name} {{{style}}}\n" for style, name in colours.items()) + _shown_in_turn(len(frames))
    head, matrix, _ = _MATRIX.split(frames[-1])
    head = _STYLE.sub("", head).replace("</style>", f"{rules}</style>", 1)
    return f"{head}{matrix}{''.join(parts)}</g></svg>\n"


def _shown_in_turn(frames: int) -> str:
    steps = frames + 2  # the last one stands longer
    share, rules = 100 / steps, ""
    for number in range(frames):
        begin, end = share * number, 100 if number == frames - 1 else share * (number + 1)
        hidden = "" if end == 100 else f"{end + 0.01:.2f}%, 100% {{ opacity: 0 }}"
        before = "" if number == 0 else f"0%, {begin:.2f}% {{ opacity: 0 }}"
        rules += f"@keyframes f{number} {{ {before} {begin + 0.01:.2f}%, {end:.2f}% {{ opacity: 1 }} {hidden} }}\n"
        rest = 1 if number == frames - 1 else 0
        turn = f"f{number} {steps * FRAME_SECONDS:.1f}s step-end infinite"
        rules += f".f{number} {{ opacity: {rest}; animation: {turn} }}\n"
    return f"{rules}@media (prefers-reduced-motion: reduce) {{ g {{ animation: none !important }} }}\n"


def without_hosts(svg: str) -> str:
    """rich names fonts on another host; a machine's own will do."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)


def main(folder: Path, wanted: Sequence[str]) -> None:
    if "demo" in wanted:
        (folder / "demo.svg").write_text(without_hosts(moving(_demo(), "kvgrpc demo --view")))
    if "top" in wanted or "view" in wanted:
        with at_work() as registry:
            if "top" in wanted:
                _top(folder, registry)
            if "view" in wanted:
                with SyncClient(registry) as client, page_of(client, "127.0.0.1:0", 1.0) as page, browser() as tab:
                    pages(folder, f"http://{page}/", tab)
    if "site" in wanted:
        with site() as address, browser() as tab:
            _site(folder, address, tab)


def _demo() -> list[str]:
    with terminal(f"{KVGRPC} demo --view") as demo:
        screens, screen, end = list[str](), "", time.monotonic() + DEMO_SECONDS
        while "kvgrpc demo: OK" not in screen:
            assert time.monotonic() < end, screen
            time.sleep(0.4)
            screen = demo.shows().replace(KVGRPC, "kvgrpc")
            if screen.strip() and screen not in screens[-1:]:
                screens.append(screen)
    return [*screens[:: -(-len(screens) // MOST_FRAMES)], screen]


def _top(folder: Path, registry: str) -> None:
    """All ranks; then the first of them, and the room that failed last at it, as the keys open them."""
    with terminal(f"{KVGRPC} top -s {registry}") as top:
        time.sleep(LOOKED_AT_SECONDS)
        (folder / "top.svg").write_text(without_hosts(drawn(top.shows(), "kvgrpc top")))
        for key, shown in (("Enter", "choose a room"), ("Enter", "in order, each rank")):
            top.types(key)
            wait_until(lambda shown=shown: shown in top.shows())
        (folder / "top-room.svg").write_text(without_hosts(drawn(top.shows(), "kvgrpc top: a room")))


@contextmanager
def site() -> Iterator[str]:
    """The address of what `make docs` built."""
    built = Path("build/site")
    assert (built / "index.html").exists(), "type `make docs` first"
    handler = partial(SimpleHTTPRequestHandler, directory=str(built))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def _site(folder: Path, address: str, tab: Browser) -> None:
    tab.looks(1440, 900, "light")
    tab.open(address)
    time.sleep(2.0)
    (folder / "site.png").write_bytes(tab.picture())


def pages(folder: Path, page: str, tab: Browser) -> None:
    tab.looks(1440, 1120, "light")
    tab.open(page)
    time.sleep(LOOKED_AT_SECONDS)  # the plots want something to draw
    for name, width, height, scheme in (
        ("view-light", 1440, 1120, "light"),
        ("view-dark", 1440, 1120, "dark"),
        ("view-narrow", 390, 1120, "light"),
    ):
        tab.looks(width, height, scheme)
        time.sleep(1.5)
        (folder / f"{name}.png").write_bytes(tab.picture())
    tab.looks(1440, 800, "light")
    tab.script("document.querySelector('#slowest button').click()")
    tab.until("return document.querySelector('#room-told svg')")
    (folder / "view-room.png").write_bytes(tab.picture())


@contextmanager
def at_work() -> Iterator[str]:
    """Two prefill and two decode ranks that hand over all the time, now and then in vain; and one that was killed."""
    server = RegistryServer(["127.0.0.1:0"], lease_ttl=600.0).open()
    names = {
        "prefill-a": "PREFILL",
        "prefill-b": "PREFILL",
        "decode-a": "DECODE",
        "decode-b": "DECODE",
        "gone": "PREFILL",
    }
    ranks = {name: RankProcess(name, role, registry=server.address, page_bytes=65536) for name, role in names.items()}
    over = threading.Event()
    thread = threading.Thread(target=_hand_over, args=(ranks, server.address, over))
    try:
        for rank in ranks.values():
            rank.opened()
        ranks["gone"].kill()
        thread.start()
        yield server.address
    finally:
        over.set()
        thread.join()
        for rank in ranks.values():
            rank.end()
        server.close()


def _hand_over(ranks: Mapping[str, RankProcess], registry: str, over: threading.Event) -> None:
    for number in itertools.count(1):
        if over.wait(0.05):
            return
        room = 7_000_000_000_000 + number
        prefill, decode = "ab"[number % 2], ranks["decode-" + "ab"[number // 2 % 2]]
        pages = range(number % 8 * 64, number % 8 * 64 + 8 * (1 + number % 7))
        decode.call("receive", room, f"{registry}/prefill-{prefill}", list(pages))
        if number % 29 == 0:
            decode.call("abort", "receivers", room)
            decode.call("wait_release", [room])
        else:
            ranks[f"prefill-{prefill}"].call("send", room, list(pages))
            decode.call("wait", "receivers", [room], [4])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or ALL)
