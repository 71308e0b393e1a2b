"""The storage backends ``file`` and ``nixl`` beside crashes, full disks, foreign files and other processes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.prefetch.storage import open_backend
from kvgrpc.prefetch.storage.base import OK, PageStatus, StorageBackend, StorageDown
from kvgrpc.prefetch.storage.file import folder as folders
from kvgrpc.prefetch.storage.file.folder import Folder
from kvgrpc.prefetch.storage.file.formats import HEADER_BYTES, OwnFormat
from tests.support import old_pages
from tests.support.storage_openers import skip_without_nixl
from tests.support.storage_pages import Arena
from tests.support.storage_writer import PAGE_BYTES, bytes_of, key

ROOT = Path(__file__).parents[2]
SECONDS = 30.0


@pytest.fixture(params=["file", "nixl"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if found == "nixl":
        skip_without_nixl()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pages"


def opened(name: str, folder: Path, **settings: object) -> StorageBackend:
    return open_backend(name, {"path": str(folder), **settings})


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def start_writer(name: str, folder: Path, seed: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.storage_writer", name, str(folder), str(seed), str(count)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert process.stdout is not None and process.stdout.readline() == "began\n"
    return process


def check_all(name: str, folder: Path, seeds: int, count: int) -> int:
    """Reads every page that a writer may have written: right bytes or MISSING. How many were there."""
    backend, arena, there = opened(name, folder), Arena(8, PAGE_BYTES), 0
    for seed in range(seeds):
        for first in range(0, count, 8):
            numbers = range(first, min(first + 8, count))
            arena.clear()
            results = backend.read([key(seed, n) for n in numbers], arena.pages(*range(len(numbers))), SECONDS)
            assert {result.status for result in results} <= {PageStatus.OK, PageStatus.MISSING}
            for place, (number, result) in enumerate(zip(numbers, results, strict=True)):
                if result.ok:
                    there += 1
                    assert arena.bytes(place) == bytes_of(seed, number)
    assert backend.close(SECONDS)
    return there


@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_a_writer_that_is_killed_leaves_whole_pages_and_nothing_else(name: str, folder: Path, kills: int) -> None:
    rng, said = random.Random(kills), 0
    for seed in range(kills):
        with start_writer(name, folder, seed, 100_000) as writer:
            assert writer.stdout is not None
            for _ in range(rng.randrange(1, 8)):
                said += int(writer.stdout.readline())
            time.sleep(rng.random() * 0.005)  # anywhere within the next pages
            writer.send_signal(signal.SIGKILL)
    assert check_all(name, folder, kills, 64) >= said > 0
    assert not [path for path in files(folder) if path.suffix != ".kv"], "what killed writers left behind is removed"


@pytest.mark.parametrize("of", ["our pid in an earlier life", "a pid that is another's by now"])
def test_what_a_killed_writer_left_is_removed_although_its_pid_lives(name: str, folder: Path, of: str) -> None:
    """In a container the next process has the same pid; after a restart of the machine any other may have it."""
    host = socket.gethostname().replace("-", "_")
    ours = of.startswith("our")
    left = folder / "ab" / f".{host}-{os.getpid() if ours else os.getppid()}-0.tmp"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half a page")
    os.utime(left, (folders._BEGAN - 1.0 if ours else time.time() - 7200,) * 2)
    backend = opened(name, folder)
    assert not left.exists()
    assert backend.close(SECONDS)


@pytest.mark.parametrize("pid", [os.getpid(), 2**22 + 1], ids=["our pid", "a pid that is not here"])
def test_what_another_container_is_writing_is_not_removed_although_the_host_name_is_ours(
    name: str, folder: Path, pid: int
) -> None:
    """Containers of one network have one name, and pids of their own, which are often the same."""
    host = socket.gethostname().replace("-", "_")
    writing = folder / "ab" / f".{host}-{pid}-1-0123abcd-0.tmp"
    writing.parent.mkdir(parents=True)
    writing.write_bytes(b"half a page")
    backend = opened(name, folder)
    assert writing.exists()
    assert backend.close(SECONDS)


def test_what_is_being_written_in_this_process_is_not_removed(folder: Path) -> None:
    first, second = Folder(folder, OwnFormat()), Folder(folder, OwnFormat())
    writing = [each.create("ab/page.kv") for each in (first, second)]
    backend = opened("file", folder)
    for descriptor, path in writing:
        assert os.path.exists(path)
        os.close(descriptor)
    assert backend.close(SECONDS)


def test_several_processes_share_a_folder(name: str, folder: Path) -> None:
    writers = [start_writer(name, folder, seed, 16) for seed in range(3)]
    reader = opened(name, folder)
    for writer in writers:
        assert writer.wait(SECONDS) == 0
        assert writer.stdout is not None
        writer.stdout.close()
    assert reader.count_leading([key(seed, n) for seed in range(3) for n in range(16)], SECONDS) == 48
    assert reader.close(SECONDS)
    assert check_all(name, folder, 3, 16) == 48


@pytest.fixture
def page(name: str, folder: Path) -> Iterator[tuple[StorageBackend, Arena, Path]]:
    """A stored page "k", and its file."""
    backend, arena = opened(name, folder), Arena(2)
    arena.fill_all()
    assert backend.write(["k"], [arena.page(0)], SECONDS) == [OK]
    yield backend, arena, folder / OwnFormat().path("k")
    assert backend.close(SECONDS)


@pytest.mark.parametrize("left", [0, 1, 8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, 36863])
def test_a_torn_file_is_missing_and_written_again(page: tuple[StorageBackend, Arena, Path], left: int) -> None:
    backend, arena, path = page
    os.truncate(path, left)
    assert backend.count_leading(["k"], SECONDS) == 0
    assert backend.read(["k"], [arena.page(1)], SECONDS)[0].status is PageStatus.MISSING
    assert backend.write(["k"], [arena.page(0)], SECONDS) == [OK]
    assert backend.read(["k"], [arena.page(1)], SECONDS) == [OK]
    assert arena.bytes(1) == arena.bytes(0)


@pytest.mark.parametrize("place", [0, 9, 40, HEADER_BYTES, HEADER_BYTES + 20_000])
def test_a_block_that_a_crash_lost_is_missing(page: tuple[StorageBackend, Arena, Path], place: int) -> None:
    backend, arena, path = page
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes(512))
    assert backend.read(["k"], [arena.page(1)], SECONDS)[0].status is PageStatus.MISSING
    assert backend.write(["k"], [arena.page(0)], SECONDS) == [OK], "and can be written again"
    assert backend.read(["k"], [arena.page(1)], SECONDS) == [OK]


@pytest.mark.parametrize("harmed", [False, True])
def test_pages_from_before_headers_named_their_checksum_are_read_and_checked(
    name: str, folder: Path, harmed: bool
) -> None:
    backend, arena, path = opened(name, folder), Arena(1, nbytes=5000), folder / OwnFormat().path(old_pages.KEY)
    path.parent.mkdir()
    path.write_bytes(old_pages.CHECKED + old_pages.PAGE[:-1] + (b"?" if harmed else old_pages.PAGE[-1:]))
    assert backend.contains([old_pages.KEY], SECONDS) == [True]
    (result,) = backend.read([old_pages.KEY], arena.pages(), SECONDS)
    assert result.status is (PageStatus.MISSING if harmed else PageStatus.OK)
    assert harmed or arena.bytes(0) == old_pages.PAGE
    assert path.exists() is not harmed
    assert backend.close(SECONDS)


def test_another_pages_file_under_this_name_is_missing(page: tuple[StorageBackend, Arena, Path]) -> None:
    backend, arena, path = page
    other = path.parents[1] / OwnFormat().path("other")
    other.parent.mkdir(exist_ok=True)
    shutil.copy(path, other)
    assert backend.count_leading(["other"], SECONDS) == 0
    assert backend.read(["other"], [arena.page(1)], SECONDS)[0].status is PageStatus.MISSING


def test_a_page_that_was_seen_whole_is_looked_at_and_not_opened(
    page: tuple[StorageBackend, Arena, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, arena, path = page
    opened_files: list[str] = []
    open_file = Folder.open

    def note(self: Folder, name: str, flags: int = 0) -> tuple[int, os.stat_result] | None:
        opened_files.append(name)
        return open_file(self, name, flags)

    monkeypatch.setattr(Folder, "open", note)
    assert backend.contains(["k"], SECONDS) == [True] and not opened_files, "we wrote it"
    os.utime(path, (1_600_000_000, 1_600_000_000))
    assert [backend.contains(["k"], SECONDS) for _ in range(3)] == [[True]] * 3 and len(opened_files) == 1
    with path.open("r+b") as file:
        file.write(bytes(512))
    assert backend.contains(["k"], SECONDS) == [False]
    assert backend.write(["k"], [arena.page(0)], SECONDS) == [OK]
    path.unlink()
    assert backend.contains(["k"], SECONDS) == [False]


def test_a_page_in_sglangs_format_is_there_when_its_time_has_changed(name: str, folder: Path) -> None:
    """No header proves it: what is there counts, whatever was seen of it before."""
    backend, arena = opened(name, folder, format="sglang"), Arena(2)
    arena.fill_all()
    assert backend.write(["k"], [arena.page(0)], SECONDS) == [OK]
    os.utime(folder / "k.bin", (1_600_000_000, 1_600_000_000))
    assert backend.contains(["k"], SECONDS) == [True] and backend.count_leading(["k"], SECONDS) == 1
    assert backend.write(["k"], [arena.page(0)], SECONDS) == [OK] and backend.stats().written == 1
    assert backend.close(SECONDS)


def put_there(path: Path, thing: str) -> None:
    """What bears a page's name and is no plain file."""
    path.parent.mkdir(exist_ok=True)
    if thing == "folder":
        path.mkdir()
    elif thing == "link":
        path.symlink_to("/etc/passwd")
    elif thing == "FIFO":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            here = os.getcwd()
            try:
                os.chdir(path.parent)  # a path of a socket has 107 characters at most
                bound.bind(path.name)
            finally:
                os.chdir(here)


@pytest.mark.parametrize("thing", ["folder", "link", "FIFO", "socket"])
def test_what_is_no_file_is_no_page(page: tuple[StorageBackend, Arena, Path], thing: str) -> None:
    """It is missing, as what is torn; and the next write takes its place, but for a folder's."""
    backend, arena, path = page
    path.unlink()
    put_there(path, thing)
    arena.fill_all()
    assert backend.contains(["k", "elsewhere"], SECONDS) == [False, False]
    results = backend.read(["k", "elsewhere"], arena.pages(), SECONDS)
    assert [result.status for result in results] == [PageStatus.MISSING] * 2
    written = backend.write(["k", "elsewhere"], arena.pages(), SECONDS)
    assert [result.ok for result in written] == [thing != "folder", True]


def test_a_fifo_for_each_thread_ends_no_storage(name: str, folder: Path) -> None:
    backend, arena = opened(name, folder, threads=4), Arena(1)
    keys = [f"k{number}" for number in range(4)]
    for each in keys:
        put_there(folder / OwnFormat().path(each), "FIFO")
    assert backend.count_leading(keys, SECONDS) == 0
    assert backend.clear() == 0 and backend.count("", SECONDS) == 0
    assert backend.write(["other"], arena.pages(), SECONDS) == [OK]
    assert backend.stats().healthy
    assert backend.close(SECONDS)


def test_the_bound_holds_and_what_was_used_stays(name: str, folder: Path) -> None:
    backend, arena = opened(name, folder, max_bytes=10 * 36864), Arena(1)
    arena.fill_all()
    for number in range(30):
        assert backend.write([f"k{number}"], arena.pages(), SECONDS) == [OK]
        assert backend.read(["k0"], arena.pages(), SECONDS) == [OK]
        assert sum(path.stat().st_size for path in files(folder)) <= 10 * 36864
    assert backend.contains(["k0", "k1", "k29"], SECONDS) == [True, False, True]
    stats = backend.stats()
    assert (stats.pages, stats.nbytes, stats.evicted) == (10, 10 * 36864, 20)
    assert backend.close(SECONDS)


def test_a_page_larger_than_the_bound_is_its_own_failure(name: str, folder: Path) -> None:
    backend, small, large = opened(name, folder, max_bytes="40KB"), Arena(1), Arena(1, nbytes=65536)
    assert backend.write(["small"], small.pages(), SECONDS) == [OK]
    (result,) = backend.write(["large"], large.pages(), SECONDS)
    assert result.status is PageStatus.FAILED and "max_bytes" in result.detail and not result.retryable
    assert backend.contains(["small"], SECONDS) == [True]
    assert backend.close(SECONDS)


def test_use_is_remembered_over_a_restart(name: str, folder: Path) -> None:
    backend, arena = opened(name, folder), Arena(1)
    for each in "abc":
        assert backend.write([each], arena.pages(), SECONDS) == [OK]
    assert backend.close(SECONDS)
    for age, each in enumerate("bca"):
        path = folder / OwnFormat().path(each)
        os.utime(path, (1_600_000_000 - age, 1_600_000_000 - age))
    backend = opened(name, folder)
    assert backend.read(["a"], arena.pages(), SECONDS) == [OK]
    assert backend.close(SECONDS)
    backend = opened(name, folder, max_bytes=2 * 36864)
    assert backend.contains(list("abc"), SECONDS) == [True, True, False]
    assert backend.close(SECONDS)


def test_the_bound_holds_also_for_what_others_write(name: str, folder: Path) -> None:
    backend, other, arena = (
        opened(name, folder, max_bytes=4 * 36864, rescan_interval=0.05),
        opened(name, folder),
        Arena(1),
    )
    for number in range(12):
        assert other.write([f"k{number}"], arena.pages(), SECONDS) == [OK]
    deadline = time.monotonic() + SECONDS
    while len(files(folder)) > 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(files(folder)) == 4
    assert backend.close(SECONDS) and other.close(SECONDS)


def test_a_page_of_more_buffers_than_the_kernel_takes_at_once_comes_back(name: str, folder: Path) -> None:
    backend, arena = opened(name, folder), Arena(2, nbytes=24, buffers=2600)
    written = arena.fill(0, seed=1)
    assert backend.write(["k"], [arena.page(0)], SECONDS) == [OK]
    assert backend.read(["k"], [arena.page(1)], SECONDS) == [OK]
    assert arena.bytes(1) == written
    assert backend.close(SECONDS)


def test_a_folder_that_is_emptied_under_us_is_made_again(name: str, folder: Path) -> None:
    backend, arena = opened(name, folder), Arena(1)
    arena.fill_all()
    assert backend.write(["k"], arena.pages(), SECONDS) == [OK]
    shutil.rmtree(folder)
    assert backend.read(["k"], arena.pages(), SECONDS)[0].status is PageStatus.MISSING
    assert backend.write(["k"], arena.pages(), SECONDS) == [OK]
    assert backend.read(["k"], arena.pages(), SECONDS) == [OK]
    assert backend.close(SECONDS)


def test_a_full_disk_fails_the_pages_that_do_not_fit_and_no_other(name: str, small_disk: Path) -> None:
    backend, arena = opened(name, small_disk), Arena(40)
    written = arena.fill_all()
    names = [f"k{number}" for number in range(40)]
    results = backend.write(names, arena.pages(), SECONDS)
    full = [result for result in results if not result.ok]
    assert 0 < len(full) < 40
    assert all(result.status is PageStatus.FAILED and "No space left" in result.detail for result in full)
    assert "set max_bytes" in full[0].detail
    arena.clear()
    there = backend.read(names, arena.pages(), SECONDS)
    assert [result.ok for result in there] == [result.ok for result in results]
    assert all(arena.bytes(number) == written[number] for number, result in enumerate(there) if result.ok)
    assert not list(small_disk.rglob(".*.tmp")), "nothing half written is left"
    assert backend.delete(names[:20], SECONDS) > 0
    arena.fill_all()
    again = [names[number] for number, result in enumerate(results) if not result.ok][:5]
    assert backend.write(again, arena.pages(*range(len(again))), SECONDS) == [OK] * len(again), "once there is room"
    assert backend.close(SECONDS)


def test_a_disk_that_hangs_costs_a_time_out_and_gives_the_page_back_later(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, arena = opened(name, folder, threads=1), Arena(3)
    answers, open_file = threading.Event(), Folder.open

    def hang(self: Folder, path: str, flags: int = 0) -> tuple[int, os.stat_result] | None:
        answers.wait(SECONDS)
        return open_file(self, path, flags)

    monkeypatch.setattr(Folder, "open", hang)
    first, second = backend.read(["hangs", "behind it"], arena.pages(0, 1), 0.2)
    assert first.status is PageStatus.TIMEOUT and first.released is not None and not first.quiescent
    assert second.status is PageStatus.TIMEOUT and second.quiescent, "it was never begun"
    with pytest.raises(StorageDown):
        backend.count_leading(["other"], 0.1)
    stats = backend.stats()
    assert stats.in_use == 1
    assert (stats.healthy, stats.detail) == (False, "all of its threads hang in calls that outlived their time")
    answers.set()
    assert first.released.wait(SECONDS)
    assert backend.count_leading(["other"], SECONDS) == 0
    assert backend.stats().healthy
    assert backend.close(SECONDS)
