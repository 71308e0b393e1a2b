"""The page's server: its files, ``/state``, ``/events`` and ``/room``; ``/cancel`` where actions are allowed. Nothing
else, and to nobody else.

Browsers of strangers are what it keeps out: a page of another site that this user's browser shows (Origin,
Sec-Fetch-Site), and a name of another site that leads here (Host; DNS rebinding).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from importlib import resources
from typing import Any
from urllib.parse import parse_qs

from kvgrpc.cli.view.looking import Looking
from kvgrpc.errors import KvGrpcError
from kvgrpc.net import is_loopback, split
from kvgrpc.observability.bounded_http import BoundedHandler, BoundedHttpServer, OpenHttpServer

# Who watch at a time, a thread each; one more is asked to come again.
MOST_WATCHERS = 16
# A watch ends after this, and the browser begins another: so one that was forgotten does not last for ever.
WATCH_SECONDS = 3600.0
# Of one write to a browser that does not read, and of a connection that is no watch.
WRITE_SECONDS = 5.0
CONNECTION_SECONDS = 10.0
FIRST_LOOK_SECONDS = 8.0
# Each asks the whole fleet.
MOST_ROOM_LOOKS = 4
_BEAT_SECONDS = 5.0

_TEXT = "text/plain; charset=utf-8"
# What became of a room, or of its cancelling, by its number and attempt.
AskRoom = Callable[[int, int], Mapping[str, Any]]
_SCRIPTS = ("view", "graph", "elements", "past", "room")
_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/view.css": ("view.css", "text/css; charset=utf-8"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in _SCRIPTS},
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_files() -> dict[str, tuple[bytes, str]]:
    """Path -> content and its type, of the package."""
    folder = resources.files("kvgrpc.cli.view") / "page"
    return {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in _PAGE.items()}


class ViewServer(OpenHttpServer):
    """Serves from construction to ``close``: ``with ViewServer("127.0.0.1:0", looking, look_at_room) as server``.

    ``token``: the password that browsers ask for; empty: none. ``names``: hosts by which the page may be called beside
    addresses and localhost. ``cancel_room``: what the page's button does; None: it has none. Raises AddressNotAllowed
    for an address that is taken.
    """

    def __init__(
        self,
        listen: str,
        looking: Looking,
        look_at_room: AskRoom,
        token: str = "",
        names: Collection[str] = (),
        cancel_room: AskRoom | None = None,
    ) -> None:
        def make(host: str, port: int) -> _PageServer:
            return _PageServer(host, port, looking, look_at_room, cancel_room, token, names)

        super().__init__(listen, "--listen", "view", make)

    def __enter__(self) -> ViewServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _PageServer(BoundedHttpServer):
    def __init__(
        self,
        host: str,
        port: int,
        looking: Looking,
        look_at_room: AskRoom,
        cancel_room: AskRoom | None,
        token: str,
        names: Collection[str],
    ) -> None:
        self.files, self.looking, self.token = page_files(), looking, token
        self.look_at_room, self.cancel_room = look_at_room, cancel_room
        self.room_looks = threading.BoundedSemaphore(MOST_ROOM_LOOKS)
        self.names = {name.lower() for name in names}
        self.loopback_only = host == "localhost" or is_loopback(host)
        self.watchers = threading.BoundedSemaphore(MOST_WATCHERS)
        super().__init__(host, port, _PageHandler, CONNECTION_SECONDS)

    def is_host(self, host: str) -> bool:
        """True if a browser that says it calls ``host`` can mean this server.

        An address can: only a name can be made to lead here by its owner. Any port: a tunnel has its own.
        """
        name = split(host)[0].lower()
        if name == "localhost" or name in self.names:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback or not self.loopback_only
        except ValueError:
            return False


class _PageHandler(BoundedHandler):
    server: _PageServer
    timeout = WRITE_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._let_in(self._refused()):
            return
        if path in self.server.files:
            content, kind = self.server.files[path]
            self.answer(200, kind, content, _HEADERS)
        elif path in ("/state", "/events") and self.command == "GET":
            self._watched(path)
        elif path == "/room" and self.command == "GET":
            self._ask_ranks(self._told)
        else:
            self._say(404, "/, /state, /events and /room are here")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        cancel = self.server.cancel_room
        if not self._let_in(self._refused() or self._no_action()):
            return
        if cancel is None or self.path.partition("?")[0] != "/cancel":
            self._say(404, "of actions /cancel is here")
        else:
            self._ask_ranks(cancel)

    def _let_in(self, refused: str) -> bool:
        """True for who may go on; the others have had their answer."""
        if refused:
            self._say(403, refused)
        elif not self._may_see():
            challenge = {"WWW-Authenticate": 'Basic realm="kvgrpc view"'}
            self.answer(401, _TEXT, b"the password is that of --view-token-file\n", challenge | _HEADERS)
        else:
            return True
        return False

    def _no_action(self) -> str:
        """Why nothing is done for whoever asks; empty: nothing speaks against it.

        Browsers send the password for pages of other sites too, but never hide from where an action comes.
        """
        if self.server.cancel_room is None:
            return "the page only shows: kvgrpc view was started without --allow-actions"
        return "" if self.headers.get_all("Origin") else "Origin: an action comes from the page itself"

    def _refused(self) -> str:
        """Why it is not answered whoever asks; empty: nothing speaks against it."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not self.server.is_host(hosts[0]):
            return "Host: this page is called by its address, localhost, or a name given with --allow-host"
        for origin in self.headers.get_all("Origin") or []:
            if origin.partition("://")[2].lower() != hosts[0].lower():
                return "Origin: only this page itself may ask"
        opened = self.headers.get("Sec-Fetch-Mode") == "navigate"  # a link somewhere to the page
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not opened:
            return "Sec-Fetch-Site: only this page itself may ask"
        return ""

    def _may_see(self) -> bool:
        if not self.server.token:
            return True
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        try:
            password = base64.b64decode(given, validate=True).partition(b":")[2] if kind.lower() == "basic" else b""
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(password, self.server.token.encode())

    def _watched(self, path: str) -> None:
        if not self.server.watchers.acquire(blocking=False):
            self._say(503, f"{MOST_WATCHERS} others watch")
            return
        try:
            if path == "/state":
                self._state()
            else:
                self._events()
        finally:
            self.server.watchers.release()

    def _state(self) -> None:
        found = self.server.looking.after(0, FIRST_LOOK_SECONDS)
        if found is None:
            self._say(503, "the first look takes longer than this; ask again")
        else:
            self.answer(200, "application/json", found[1], _HEADERS)

    def _told(self, room: int, attempt: int) -> Mapping[str, Any]:
        return {**self.server.look_at_room(room, attempt), "may_cancel": self.server.cancel_room is not None}

    def _ask_ranks(self, about: AskRoom) -> None:
        asked = parse_qs(self.path.partition("?")[2])
        room, attempt = (asked.get(name, [""])[-1] for name in ("room", "attempt"))
        if not room.isdecimal() or not 0 < int(room) < 2**63 or not (attempt or "0").isdecimal():
            return self._say(400, "room is a number from 1 to 2^63-1, attempt one from 0 on")
        if not self.server.room_looks.acquire(blocking=False):
            return self._say(503, f"{MOST_ROOM_LOOKS} others look for a room; ask again")
        try:
            found = about(int(room), min(int(attempt or 0), 2**32 - 1))
        except KvGrpcError as error:
            return self._say(502, f"the registry was not read: {error}"[:500])
        finally:
            self.server.room_looks.release()
        self.answer(200, "application/json", json.dumps(found, separators=(",", ":")).encode(), _HEADERS)

    def _events(self) -> None:
        self.server.let_last(self.connection, WATCH_SECONDS)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        number, end = 0, time.monotonic() + WATCH_SECONDS
        try:
            while time.monotonic() < end and not self.server.looking.closed:
                found = self.server.looking.after(number, _BEAT_SECONDS)
                if found is None:
                    # Nothing new: tells a browser that we are here, and us whether it is.
                    self.wfile.write(b": looking\n\n")
                else:
                    number, seen = found
                    self.wfile.write(b"data: %b\n\n" % seen)
                self.wfile.flush()
        except OSError:
            return  # it has left, or does not read

    def _say(self, code: int, text: str) -> None:
        self.answer(code, _TEXT, f"{text}\n".encode(), _HEADERS)
