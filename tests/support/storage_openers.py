"""The backends that run the suite, each freshly opened."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.errors import FeatureDisabled
from kvgrpc.prefetch.storage import open_backend
from kvgrpc.prefetch.storage.base import StorageBackend
from tests.support.faults.storage import FaultyBackend, memory_backend


def _mooncake(request: pytest.FixtureRequest, **settings: object) -> StorageBackend:
    store = request.getfixturevalue("mooncake_store")
    config = {"master": store.address, "namespace": "suite", "lost_seconds": 1, **settings}
    return open_backend("mooncake", config)


def skip_without_nixl() -> None:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed: pip install 'kvgrpc[nixl]'")


def _nixl(folder: Path, **settings: object) -> StorageBackend:
    skip_without_nixl()
    return open_backend("nixl", {"path": str(folder), **settings})


def hf3fs(folder: Path, **settings: object) -> StorageBackend:
    sizes = {"page_bytes": "64KB", "max_bytes": "16MB"}
    return open_backend("hf3fs", {"path": str(folder), "client": "local", **sizes, **settings})


def _usrbio(folder: Path) -> StorageBackend:
    try:
        return hf3fs(Path(os.environ.get("HF3FS_FOLDER", folder)), client="usrbio", name=folder.name)
    except FeatureDisabled as error:
        pytest.skip(error.message)


def _documented(folder: Path) -> StorageBackend:
    """The backend that docs/storage/write-a-backend.md builds."""
    text = (Path(__file__).parents[2] / "docs" / "storage" / "write-a-backend.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    backend: StorageBackend = names["from_config"]({"path": str(folder / "pages.db")})
    return backend


Opener = Callable[[pytest.FixtureRequest, pytest.TempPathFactory], StorageBackend]

OPENERS: dict[str, Opener] = {
    "memory": lambda request, folders: memory_backend(),
    "without a fault": lambda request, folders: FaultyBackend(memory_backend()),
    "file": lambda request, folders: open_backend("file", {"path": str(folders.mktemp("file"))}),
    "file past the page cache": lambda request, folders: open_backend(
        "file", {"path": str(folders.mktemp("direct")), "direct": True, "sync": True, "max_bytes": "64MB"}
    ),
    "nixl": lambda request, folders: _nixl(folders.mktemp("nixl")),
    "nixl past the page cache": lambda request, folders: _nixl(
        folders.mktemp("nixl"), direct=True, sync=True, max_bytes="64MB"
    ),
    "hf3fs": lambda request, folders: hf3fs(folders.mktemp("hf3fs")),
    "hf3fs by its own client": lambda request, folders: _usrbio(folders.mktemp("usrbio")),
    "documented": lambda request, folders: _documented(folders.mktemp("documented")),
    "mooncake": lambda request, folders: _mooncake(request),
    "mooncake, zero copy": lambda request, folders: _mooncake(request),
}
PARAMS = [pytest.param(name, marks=pytest.mark.slow) if name == "mooncake" else name for name in OPENERS]
SHARED = {"mooncake, zero copy"}
"""Opened like the one before them, but the suite's pages lie in memory that other processes can map."""
