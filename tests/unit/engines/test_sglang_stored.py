"""Pages beyond the engine's own that SGLang's Lookup tells, where peers have them and a store does not answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvgrpc.engines.sglang.cache.stored import StoredPages
from kvgrpc.prefetch.storage.base import StorageDown
from kvgrpc.prefetch.storage.keys import KeyMode, Keys, PageIdentity
from kvgrpc.pull.taking.peers import PeersBackend

HASHES = [f"{number:064x}" for number in range(10)]


class Near(PeersBackend):
    """Peers have so many leading pages; the store has all, or is down; what each question was given to wait is kept."""

    def __init__(self, pages: int, *, down: bool) -> None:
        self.pages, self.down = pages, down
        self.waits: list[float] = []
        self.name = "peers"

    def count_peers(self, keys: Sequence[str], timeout: float) -> int:
        self.waits.append(timeout)
        return self.pages

    def count_stored(self, keys: Sequence[str], timeout: float) -> int:
        self.waits.append(timeout)
        if self.down:
            raise StorageDown("the store does not answer", "127.0.0.1:1")
        return len(keys)


def stored(backend: Near) -> StoredPages:
    identity = PageIdentity(model="m", dtype="bfloat16", layout="l", page_size=64, tp_size=4)
    return StoredPages(backend, Keys(KeyMode.KVGRPC, identity), 4_096)


def test_a_store_that_is_down_hides_no_page_of_a_peer() -> None:
    assert stored(Near(4, down=True)).leading_at_all_ranks(HASHES, 1.0) == 4
    with pytest.raises(StorageDown):
        stored(Near(0, down=True)).leading_at_all_ranks(HASHES, 1.0)


def test_all_ranks_pages_are_looked_for_within_one_time() -> None:
    backend = Near(4, down=False)
    assert stored(backend).leading_at_all_ranks(HASHES, 1.0) == len(HASHES)
    assert len(backend.waits) == 5 and backend.waits[-1] < 1.0
