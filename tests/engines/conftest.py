"""These tests drive real engines: `make test-engines`, in an environment of its own. `make test` passes them by."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engines.model import Reference

collect_ignore_glob = [f"test_{engine}*.py" for engine in ("sglang", "vllm") if not find_spec(engine)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def reference(folder: Path) -> Iterator[Reference]:
    from tests.engines.model import Reference

    yield Reference(folder)
