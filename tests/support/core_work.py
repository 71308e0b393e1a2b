"""A core's work, taken one kind at a time: a test looks at one kind, and a world does each at its own moment."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Protocol

from kvgrpc.transfer.protocol.decode.core import DecodeWork
from kvgrpc.transfer.protocol.prefill.core import PrefillWork


class Core(Protocol):
    def take_work(self) -> DecodeWork | PrefillWork: ...


class Work:
    """Keeps what was taken from the core and not done yet."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._kept: dict[str, list[Any]] = {}

    def take(self, kind: str) -> list[Any]:
        """All of one kind (a field of DecodeWork or PrefillWork)."""
        work = self._core.take_work()
        for each in fields(work):
            self._kept.setdefault(each.name, []).extend(getattr(work, each.name))
        taken, self._kept[kind] = self._kept[kind], []
        return taken
