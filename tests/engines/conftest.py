"""These tests drive real engines: `make test-engines`, in an environment of its own. `make test` passes them by."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")

if TYPE_CHECKING:
    from kvgrpc.server import RegistryServer
    from tests.engines.model import Reference

collect_ignore_glob = [f"test_{engine}*.py" for engine in ("sglang", "vllm") if not find_spec(engine)]


@pytest.fixture(scope="session", autouse=True)
def _no_autogroups() -> Iterator[None]:
    """Engines are sessions of their own. Where Linux gives each session a share of every processor, and these are few,
    the thread that delivers loopback packets waited for seconds: peers lost each other (docs/lab/vllm.md)."""
    if not AUTOGROUPS.exists() or not os.access(AUTOGROUPS, os.W_OK):
        yield
        return
    before = AUTOGROUPS.read_text()
    AUTOGROUPS.write_text("0")
    yield
    AUTOGROUPS.write_text(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    """Its address."""
    from kvgrpc.server import RegistryServer

    server = RegistryServer(["127.0.0.1:0"]).open()
    yield server.address
    server.close()


@pytest.fixture
def own_registry() -> Iterator[RegistryServer]:
    """Of one test, for ranks whose shapes are another's."""
    from kvgrpc.server import RegistryServer

    server = RegistryServer(["127.0.0.1:0"]).open()
    yield server
    server.close()


@pytest.fixture(scope="session")
def reference(folder: Path) -> Iterator[Reference]:
    from tests.engines.model import Reference

    yield Reference(folder)
