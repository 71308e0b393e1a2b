"""One rank with a cache, and who asks it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from tests.support.cache_serving import CacheRank, open_cache_rank
from tests.support.pull_fleet import PullFleet


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheRank]:
    opened = open_cache_rank(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def client(cache: CacheRank) -> Iterator[SyncClient]:
    with SyncClient(cache.address) as opened:
        yield opened


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[PullFleet]:
    with closing(PullFleet(tmp_path)) as opened:
        yield opened
