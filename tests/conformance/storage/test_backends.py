"""What every storage backend promises. A third-party one passes it by adding a fixture parameter."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.prefetch.storage.base import OK, PageStatus, StorageBackend, StorageDown
from kvgrpc.prefetch.storage.keys import Keys, PageIdentity
from tests.support.storage_openers import OPENERS, PARAMS, SHARED
from tests.support.storage_pages import Arena

SECONDS = 20.0


@pytest.fixture(scope="session", params=PARAMS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageBackend]:
    """One for all tests, because some take a second to open."""
    backend = OPENERS[request.param](request, tmp_path_factory)
    yield backend
    assert backend.close(SECONDS)


@pytest.fixture
def backend(opened: StorageBackend) -> Iterator[StorageBackend]:
    yield opened
    opened.clear()


@pytest.fixture
def arena(backend: StorageBackend, request: pytest.FixtureRequest) -> Arena:
    arena = Arena(16, shared=request.node.callspec.params["opened"] in SHARED)
    backend.register([arena.range])
    return arena


def keys(count: int, prefix: str = "page") -> list[str]:
    return [f"{prefix}-{number:04x}" for number in range(count)]


def test_pages_come_back_with_their_bytes(backend: StorageBackend, arena: Arena) -> None:
    written = arena.fill_all()
    assert backend.write(keys(16), arena.pages(), SECONDS) == [OK] * 16
    assert backend.count_leading(keys(16), SECONDS) == 16
    arena.clear()
    assert backend.read(keys(16), arena.pages(), SECONDS) == [OK] * 16
    assert [arena.bytes(number) for number in range(16)] == written


def test_they_come_back_into_other_pages_in_another_order_and_split_otherwise(
    backend: StorageBackend, arena: Arena
) -> None:
    written = arena.fill_all()
    backend.write(keys(16), arena.pages(), SECONDS)
    other = Arena(16, nbytes=32768, buffers=1)
    backend.register([other.range])
    numbers = [9, 3, 14]
    assert backend.read([keys(16)[number] for number in numbers], other.pages(5, 0, 2), SECONDS) == [OK] * 3
    assert [other.bytes(place) for place in (5, 0, 2)] == [written[number] for number in numbers]
    assert other.bytes(1) == bytes(32768), "no other page is touched"


def test_a_page_that_is_not_there_is_missing_and_the_others_are_read(backend: StorageBackend, arena: Arena) -> None:
    written = arena.fill_all()
    here = [key for number, key in enumerate(keys(16)) if number not in (3, 7)]
    assert backend.write(here, [arena.page(int(key[-4:], 16)) for key in here], SECONDS) == [OK] * 14
    arena.clear()
    results = backend.read(keys(16), arena.pages(), SECONDS)
    assert [number for number, result in enumerate(results) if result.status is PageStatus.MISSING] == [3, 7]
    assert all(arena.bytes(number) == written[number] for number, result in enumerate(results) if result.ok)
    assert all(result.quiescent for result in results)


@pytest.mark.parametrize(("there", "leading"), [([], 0), ([0], 1), ([0, 1, 2], 3), ([1, 2], 0), ([0, 1, 3, 4], 2)])
def test_pages_are_counted_up_to_the_first_that_is_missing(
    backend: StorageBackend, arena: Arena, there: list[int], leading: int
) -> None:
    arena.fill_all()
    backend.write([keys(5)[number] for number in there], arena.pages(*there) if there else [], SECONDS)
    assert backend.count_leading(keys(5), SECONDS) == leading
    assert backend.contains(keys(5), SECONDS) == [number in there for number in range(5)]


def test_a_second_write_is_ok_and_keeps_the_first_bytes(backend: StorageBackend, arena: Arena) -> None:
    first = arena.fill(0, seed=1)
    assert backend.write(["k"], [arena.page(0)], SECONDS) == [OK]
    arena.fill(1, seed=2)
    assert backend.write(["k"], [arena.page(1)], SECONDS) == [OK]
    assert backend.read(["k"], [arena.page(2)], SECONDS) == [OK]
    assert arena.bytes(2) == first


def test_a_key_twice_in_a_batch_is_stored_once(backend: StorageBackend, arena: Arena) -> None:
    first = arena.fill(0, seed=1)
    assert backend.write(["k", "k"], arena.pages(0, 0), SECONDS) == [OK] * 2
    assert backend.read(["k", "k"], arena.pages(1, 2), SECONDS) == [OK] * 2
    assert arena.bytes(1) == arena.bytes(2) == first


def test_a_page_of_another_size_is_missing_to_a_reader_and_failed_to_a_writer(
    backend: StorageBackend, arena: Arena
) -> None:
    first = arena.fill(0, seed=1)
    small, large = Arena(1, nbytes=4096), Arena(1, nbytes=65536)
    backend.register([small.range, large.range])
    assert backend.write(["k"], [arena.page(0)], SECONDS) == [OK]
    for other in (small, large):
        assert [each.status for each in backend.read(["k"], other.pages(), SECONDS)] == [PageStatus.MISSING]
        assert [each.status for each in backend.write(["k"], other.pages(), SECONDS)] == [PageStatus.FAILED]
    assert backend.read(["k"], [arena.page(3)], SECONDS) == [OK]
    assert arena.bytes(3) == first


def test_memory_that_was_never_registered_works_too(backend: StorageBackend) -> None:
    stranger = Arena(2, nbytes=4000, buffers=3)
    written = stranger.fill_all()
    assert backend.write(keys(2), stranger.pages(), SECONDS) == [OK] * 2
    stranger.clear()
    assert backend.read(keys(2), stranger.pages(), SECONDS) == [OK] * 2
    assert [stranger.bytes(number) for number in range(2)] == written


def test_deleted_pages_are_gone_and_counted(backend: StorageBackend, arena: Arena) -> None:
    arena.fill_all()
    backend.write(keys(4), arena.pages(0, 1, 2, 3), SECONDS)
    assert backend.delete([keys(4)[1], "never", keys(4)[2]], SECONDS) == 2
    assert backend.count_leading(keys(4), SECONDS) == 1
    statuses = [result.status for result in backend.read(keys(4), arena.pages(4, 5, 6, 7), SECONDS)]
    assert statuses == [PageStatus.OK, PageStatus.MISSING, PageStatus.MISSING, PageStatus.OK]


def test_what_is_counted_is_what_a_clear_drops(backend: StorageBackend, arena: Arena) -> None:
    """Also where pages came twice, did not fit, or were deleted."""
    arena.fill_all()
    names = keys(4)
    backend.write(names, arena.pages(0, 1, 2, 3), SECONDS)
    backend.write([names[0], names[0]], arena.pages(4, 5), SECONDS)
    assert backend.write([names[1]], [arena.pages(6)[0][:1]], SECONDS)[0].status is PageStatus.FAILED
    assert backend.delete([names[2]], SECONDS) == 1
    assert backend.count("", SECONDS) in (3, None)
    assert backend.clear("", SECONDS) == 3
    assert backend.count("", SECONDS) in (0, None)


def test_clear_drops_everything(backend: StorageBackend, arena: Arena) -> None:
    arena.fill_all()
    backend.write(keys(4), arena.pages(0, 1, 2, 3), SECONDS)
    assert backend.clear() == 4
    assert backend.count_leading(keys(4), SECONDS) == 0
    assert backend.write(keys(4), arena.pages(0, 1, 2, 3), SECONDS) == [OK] * 4


def test_of_two_extra_keys_in_one_store_one_is_counted_and_cleared(backend: StorageBackend, arena: Arena) -> None:
    arena.fill_all()
    ours = Keys("kvgrpc", PageIdentity(model="org/m", dtype="float16", layout="x", page_size=4))
    hashes = {each: [f"{number:02x}{row:02x}" * 16 for number in range(4)] for row, each in enumerate(["", "a", "b"])}
    for index, (extra_key, names) in enumerate(hashes.items()):
        written = backend.write(
            ours.of_all(names, extra_key=extra_key), arena.pages(*range(4 * index, 4 * index + 4)), SECONDS
        )
        assert written == [OK] * 4
    for extra_key in ("a", ""):
        prefix = ours.prefix_of(extra_key)
        assert prefix is not None and backend.count(prefix, SECONDS) in (4, None)
        assert backend.clear(prefix, SECONDS) == 4
        assert backend.count(prefix, SECONDS) in (0, None)
    left = {
        extra_key: backend.count_leading(ours.of_all(names, extra_key=extra_key), SECONDS)
        for extra_key, names in hashes.items()
    }
    assert left == {"": 0, "a": 0, "b": 4}
    assert ours.prefix is not None and backend.count(ours.prefix, SECONDS) in (4, None)


def test_of_two_models_in_one_store_one_is_cleared(backend: StorageBackend, arena: Arena) -> None:
    arena.fill_all()
    # The second begins as the first does, and what is special in a pattern is nothing special in a key.
    names = ["a.model+1-00/kv/", "a.model+1-00b/kv/", "aXmodel+1-00/kv/"]
    for number, name in enumerate(names):
        backend.write(keys(3, name), arena.pages(*range(3 * number, 3 * number + 3)), SECONDS)
    told: list[str] = []
    end = backend.on_removed(told.extend)
    assert backend.clear("a.model+1-00/", SECONDS) == 3
    assert [backend.contains(keys(3, name), SECONDS) for name in names] == [[False] * 3, [True] * 3, [True] * 3]
    assert backend.clear("a.model+1-00/", SECONDS) == 0
    if end is not None:
        assert sorted(told) == keys(3, names[0])
        end()
        backend.clear()
        assert len(told) == 3


@pytest.mark.parametrize(
    "key", ["../../escape", "/etc/passwd", "a/b/../c", ".", "a\0b", "名前" * 20, "x" * 1000, "C:\\"]
)
def test_any_text_is_a_key_and_stays_apart(backend: StorageBackend, arena: Arena, key: str) -> None:
    written = arena.fill(0, seed=1)
    assert backend.count_leading([key], SECONDS) == 0
    assert backend.write([key], [arena.page(0)], SECONDS) == [OK]
    assert backend.count_leading([key, key + "'"], SECONDS) == 1
    assert backend.read([key], [arena.page(1)], SECONDS) == [OK]
    assert arena.bytes(1) == written


def test_many_threads_at_once_disturb_each_other_nowhere(backend: StorageBackend) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        arena = Arena(8)
        backend.register([arena.range])
        for turn in range(4):
            names = keys(8, f"shared-{turn}" if number % 2 else f"own-{number}-{turn}")
            seed = 1000 * turn if number % 2 else 1000 * turn + 100_000 * (number + 1)
            written = arena.fill_all(seed)
            if any(not result.ok for result in backend.write(names, arena.pages(), SECONDS)):
                wrong.append(f"write {number} {turn}")
            arena.clear()
            if any(not result.ok for result in backend.read(names, arena.pages(), SECONDS)):
                wrong.append(f"read {number} {turn}")
            if [arena.bytes(page) for page in range(8)] != written:
                wrong.append(f"bytes {number} {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_no_pages_are_no_work(backend: StorageBackend) -> None:
    assert backend.read([], [], SECONDS) == backend.write([], [], SECONDS) == []
    assert backend.count_leading([], SECONDS) == backend.delete([], SECONDS) == 0


def test_without_time_nothing_is_begun(backend: StorageBackend, arena: Arena) -> None:
    arena.fill_all()
    results = backend.write(keys(2), arena.pages(0, 1), 0.0)
    assert [result.status for result in results] == [PageStatus.TIMEOUT] * 2
    assert all(result.quiescent for result in results)
    assert backend.count_leading(keys(2), SECONDS) == 0
    with pytest.raises(StorageDown):
        backend.count_leading(keys(2), 0.0)


@pytest.mark.parametrize(
    ("names", "pages"),
    [
        (["a"], []),
        ([], [((4096, 16),)]),
        (["a"], [()]),
        (["a"], [((4096, 0),)]),
        (["a"], [((0, 16),)]),
        ([""], [((4096, 16),)]),
        (["\ud800"], [((4096, 16),)]),
        (["x" * 1025], [((4096, 16),)]),
    ],
)
def test_arguments_without_sense_are_refused(backend: StorageBackend, names: list[str], pages: list[object]) -> None:
    for call in (backend.read, backend.write):
        with pytest.raises(InvalidRequest):
            call(names, pages, SECONDS)  # type: ignore[arg-type]


def test_stats_count_what_happened(backend: StorageBackend, arena: Arena) -> None:
    def counts() -> list[int]:
        stats = backend.stats()
        return [stats.written, stats.hits, stats.misses, stats.failed, stats.timeouts]

    before = counts()
    arena.fill_all()
    backend.write(keys(4), arena.pages(0, 1, 2, 3), SECONDS)
    backend.write(keys(4), arena.pages(0, 1, 2, 3), SECONDS)
    backend.read(keys(6), arena.pages(4, 5, 6, 7, 8, 9), SECONDS)
    assert [after - earlier for after, earlier in zip(counts(), before, strict=True)] == [4, 4, 2, 0, 0]
    assert backend.stats().healthy and backend.stats().in_use == 0


@pytest.mark.parametrize("name", PARAMS)
def test_a_closed_backend_answers_and_never_hangs(
    name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    backend, arena = OPENERS[name](request, tmp_path_factory), Arena(1)
    arena.fill_all()
    assert backend.write(keys(1), arena.pages(), SECONDS) == [OK]
    backend.clear()
    assert backend.close(SECONDS)
    assert [each.status for each in backend.read(keys(1), arena.pages(), SECONDS)] == [PageStatus.FAILED]
    assert [each.status for each in backend.write(keys(1), arena.pages(), SECONDS)] == [PageStatus.FAILED]
    with pytest.raises(StorageDown):
        backend.count_leading(keys(1), SECONDS)
    assert not backend.stats().healthy
    assert backend.close(SECONDS)
