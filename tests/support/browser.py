"""A real browser without a window: Debian's chromium, driven over the WebDriver protocol by its chromedriver."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CALL_SECONDS = 60.0
# A chromium that was not asked for asks other hosts for updates of its parts, and wants a sandbox that root has not.
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-proxy-server", "--disable-component-update")
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def missing() -> str:
    """What this machine lacks for it; empty: nothing."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(lacking)} here (Debian: chromium, chromium-driver)" if lacking else ""


class Browser:
    """One tab. ``script`` runs the body of a JavaScript function in it, and returns what that returns."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, url: str) -> None:
        _call("POST", f"{self._session}/url", {"url": url})

    def script(self, body: str, *arguments: object) -> Any:
        return _call("POST", f"{self._session}/execute/sync", {"script": body, "args": list(arguments)})

    def until(self, body: str, *arguments: object, seconds: float = 20.0) -> Any:
        """Runs ``body`` until it returns something true; that. It returns what the page shows, so it says what was."""
        end = time.monotonic() + seconds
        while not (found := self.script(body, *arguments)):
            assert time.monotonic() < end, f"not within {seconds:.0f} s: {body}\n{self.script(_PAGE_TEXT)}"
            time.sleep(0.02)
        return found

    def keys(self, text: str) -> None:
        """Typed into whatever has the focus."""
        actions = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        _call("POST", f"{self._session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def devtools(self, command: str, **parameters: object) -> Any:
        return _call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def looks(self, width: int, height: int, scheme: str) -> None:
        """How large the page is, and "light" or "dark"."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self) -> bytes:
        """What the tab shows, as PNG."""
        found: str = _call("GET", f"{self._session}/screenshot")
        return base64.b64decode(found)

    def complaints(self) -> list[str]:
        """What the console was told since it was last asked: errors, warnings, refusals."""
        return [each["message"] for each in _call("POST", f"{self._session}/se/log", {"type": "browser"})]


_PAGE_TEXT = "return document.body.innerText.slice(0, 3000)"


@contextmanager
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory() as folder:
        command = ["chromedriver", "--port=0", "--allowed-ips=127.0.0.1"]
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            root = f"http://127.0.0.1:{_port_of(driver)}/session"
            options = {"args": [*ARGUMENTS, f"--user-data-dir={folder}"], "binary": shutil.which("chromium")}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            opened = _call("POST", root, {"capabilities": {"alwaysMatch": wanted}})
            session = f"{root}/{opened['sessionId']}"
            try:
                yield Browser(session)
            finally:
                _call("DELETE", session)
        finally:
            driver.terminate()
            driver.wait(10)


def _port_of(driver: subprocess.Popen[str]) -> int:
    assert driver.stdout is not None
    for line in driver.stdout:
        if "started successfully on port" in line:
            return int(line.rstrip().rstrip(".").rsplit(" ", 1)[1])
    raise AssertionError("chromedriver did not start")


def _call(method: str, url: str, body: object = None) -> Any:
    data = None if method in ("GET", "DELETE") else json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with _DIRECT.open(request, timeout=CALL_SECONDS) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as refused:
        raise AssertionError(json.load(refused)["value"]["message"]) from None
