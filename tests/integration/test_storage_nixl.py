"""The storage backend ``nixl``, where the real package is installed; its files are those of test_storage_file.py."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvgrpc.errors import FeatureDisabled
from kvgrpc.prefetch.storage import open_backend
from kvgrpc.prefetch.storage.base import OK, PageStatus, StorageBackend
from kvgrpc.prefetch.storage.nixl.agent import Agent
from tests.support.storage_openers import skip_without_nixl
from tests.support.storage_pages import Arena

ROOT = Path(__file__).parents[2]
SECONDS = 30.0


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    if "absent" not in request.node.name:
        skip_without_nixl()


def opened(folder: Path, **settings: object) -> StorageBackend:
    return open_backend("nixl", {"path": str(folder), **settings})


def queues() -> int:
    """Queues for asynchronous I/O that the kernel keeps for this process: an agent has one."""
    return sum("[aio]" in line for line in Path("/proc/self/maps").read_text().splitlines())


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_where_the_package_is_absent_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FeatureDisabled, match="pip install"):
        opened(tmp_path)


def test_it_is_nixl_that_moves_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> int:
        raise AssertionError("the kernel's own calls are for what NIXL cannot do")

    for call in ("preadv", "pwritev"):
        monkeypatch.setattr(os, call, never)
    backend, arena = opened(tmp_path), Arena(2)
    written = arena.fill(0, seed=1)
    assert backend.write(["k"], [arena.page(0)], SECONDS) == [OK]
    assert backend.read(["k"], [arena.page(1)], SECONDS) == [OK]
    assert arena.bytes(1) == written
    assert backend.close(SECONDS)


@pytest.mark.parametrize(("writer", "reader"), [("file", "nixl"), ("nixl", "file")])
def test_it_shares_a_folder_with_the_backend_file(tmp_path: Path, writer: str, reader: str) -> None:
    arena = Arena(2)
    written = arena.fill(0, seed=1)
    first, second = (open_backend(name, {"path": str(tmp_path)}) for name in (writer, reader))
    assert first.write(["k"], [arena.page(0)], SECONDS) == [OK]
    assert second.read(["k"], [arena.page(1)], SECONDS) == [OK]
    assert arena.bytes(1) == written
    assert first.close(SECONDS) and second.close(SECONDS)


def test_what_nixl_fails_is_done_without_it_and_it_is_tried_again_for_the_next_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, left = Agent._transfer, [3]

    def faulty(agent: Agent, operation: str, *rest: object) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("NIXL_ERR_BACKEND")
        real(agent, operation, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Agent, "_transfer", faulty)
    backend, arena = opened(tmp_path, threads=1), Arena(4)
    written = arena.fill_all()
    with caplog.at_level(logging.WARNING):
        assert backend.write(list("abcd"), arena.pages(), SECONDS) == [OK] * 4
        arena.clear()
        assert backend.read(list("abcd"), arena.pages(), SECONDS) == [OK] * 4
    assert [arena.bytes(number) for number in range(4)] == written
    assert [record.getMessage().count("NIXL_ERR_BACKEND") for record in caplog.records] == [1] * 3
    assert backend.close(SECONDS)


def test_what_nixl_does_not_end_in_time_is_abandoned_and_its_buffers_are_free(tmp_path: Path) -> None:
    backend, arena = open_backend("file", {"path": str(tmp_path)}), Arena(1, nbytes=8 << 20)
    arena.fill_all()
    assert backend.write(["k"], arena.pages(), SECONDS) == [OK]
    assert backend.close(SECONDS)
    before = queues()
    backend = opened(tmp_path, transfer_timeout=1e-6, direct=True, threads=1)
    for call, key in ((backend.read, "k"), (backend.write, "other")):
        (result,) = call([key], arena.pages(), SECONDS)
        assert (result.status, result.released, result.retryable) == (PageStatus.FAILED, None, True)
        assert "transfer_timeout" in result.detail
        assert queues() == before, "its queue is gone, so the kernel is done with the buffers"
    assert backend.contains(["k", "other"], SECONDS) == [True, False]
    assert not list(tmp_path.rglob("*.tmp"))
    assert backend.close(SECONDS)


def test_agents_queues_and_threads_are_gone_when_it_is_closed(tmp_path: Path) -> None:
    def cycle() -> Sequence[object]:
        backend, arena = opened(tmp_path), Arena(8)
        arena.fill_all()
        assert backend.write(list("abcdefgh"), arena.pages(), SECONDS) == [OK] * 8
        assert queues() > before
        assert {f"kvgrpc-nixl-{number}" for number in range(4)} <= threads()
        backend.clear()
        assert backend.close(SECONDS)
        return queues(), len(os.listdir("/proc/self/fd")), ours()

    def ours() -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if "nixl" in thread.name)

    before, others = queues(), ours()  # of backends that other tests have open
    first = cycle()
    assert first[0] == before and first[2] == others
    assert [cycle() for _ in range(10)] == [first] * 10


def test_standard_output_and_the_settings_of_logging_stay_ours(tmp_path: Path) -> None:
    program = (
        "import logging, sys\n"
        "from kvgrpc.prefetch.storage import open_backend\n"
        "backend = open_backend('nixl', {'path': sys.argv[1]})\n"
        "assert logging.raiseExceptions\n"
        "assert backend.close(20)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
