"""Writes kvgrpc/client/sync.py to the file that is named: a blocking method for each of ``Client`` that waits.

Signatures and docstrings are those of ``kvgrpc/client/aio.py``. ``_seconds_of_NAME`` of ``BlockingClient`` says how
long NAME may take, where that is not what the client says.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "kvgrpc" / "client"
HEAD = '''"""The client for code without an event loop. Generated from ``aio.py`` by `make gen`: do not edit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvgrpc.client.aio import Client
from kvgrpc.client.blocking import BlockingClient
from kvgrpc.client.engines import Engines
from kvgrpc.client.sources import Sources
from kvgrpc.client.watch import WatchPart
from kvgrpc.v1 import {modules}

if TYPE_CHECKING:
    from kvgrpc.client.fleet import RankAnswer
    from kvgrpc.client.following.sync_follower import SyncEventFollower

T = TypeVar("T")


class SyncClient(BlockingClient):
    """``Client`` for plain code and any thread but the loop's own: ``with SyncClient("127.0.0.1:8998") as client``."""

    def follow(self, *, engine: str = "", dp: int = 0, live: bool = False) -> SyncEventFollower:
        """A follower of one stream of the process, to be started: ``with client.follow() as follower``."""
        from kvgrpc.client.following.sync_follower import SyncEventFollower

        return SyncEventFollower(self.address, engine=engine, dp=dp, live=live, security=self._security)
'''


def main() -> None:
    blocking = (CLIENT / "blocking.py").read_text()
    body = "\n".join(method(each, f"_seconds_of_{each.name}(" in blocking) for each in waiting_methods())
    modules = ", ".join(sorted(set(re.findall(r"\b\w+_pb2\b", body))))
    command = [str(Path(sys.executable).with_name("ruff")), "format", "--stdin-filename", "kvgrpc/client/sync.py", "-"]
    source = HEAD.replace("{modules}", f"({modules})") + body
    formatted = subprocess.run(command, input=source, capture_output=True, text=True, check=True, cwd=CLIENT.parents[1])
    Path(sys.argv[1]).write_text(formatted.stdout)


def waiting_methods() -> list[ast.AsyncFunctionDef]:
    module = ast.parse((CLIENT / "aio.py").read_text())
    client = next(each for each in module.body if isinstance(each, ast.ClassDef) and each.name == "Client")
    return [each for each in client.body if isinstance(each, ast.AsyncFunctionDef) and not each.name.startswith("_")]


def method(found: ast.AsyncFunctionDef, has_seconds: bool) -> str:
    assert found.returns is not None
    returns = ast.unparse(found.returns).replace("AsyncIterator[", "Iterator[")
    words = (ast.get_docstring(found) or "").replace("contextlib.aclosing", "contextlib.closing")
    plain, named = found.args.args[1:], found.args.kwonlyargs
    given = ", ".join([*(each.arg for each in plain), *(f"{each.arg}={each.arg}" for each in named)])
    how = "_iterate" if returns.startswith("Iterator[") else "_run"
    # Before the coroutine is made, which nobody would await where these are refused.
    checked = f"seconds = self._seconds_of_{found.name}({given})\n        " if has_seconds else ""
    seconds = ", seconds" if has_seconds else ""
    words += "\n" if "\n\n" in words else ""
    indented = words.replace("\n", "\n        ").replace("\n        \n", "\n\n")
    return f'''
    def {found.name}({ast.unparse(found.args)}) -> {returns}:
        """{indented}"""
        {checked}return self.{how}(self._client.{found.name}({given}){seconds})
'''


if __name__ == "__main__":
    main()
