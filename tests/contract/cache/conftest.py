"""One rank with a cache, and who asks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from tests.support.cache_serving import CacheRank, open_cache_rank


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheRank]:
    opened = open_cache_rank(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def client(cache: CacheRank) -> Iterator[SyncClient]:
    with SyncClient(cache.address) as opened:
        yield opened
