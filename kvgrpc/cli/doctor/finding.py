"""One line of ``kvgrpc doctor``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A thing that was looked at, "ok", "missing" or "note", and what to know or to do."""

    what: str
    state: str
    remark: str
