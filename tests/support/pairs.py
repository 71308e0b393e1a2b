"""A prefill and a decode in processes of their own, and what their tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from tests.support.rank_host import PAGES, RankProcess
from tests.support.waiting import wait_until

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = 0, 1, 2, 3, 4
Start = Callable[..., RankProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[RankProcess] = []

    def open_one(engine: str, role: str, **settings: Any) -> RankProcess:
        process = RankProcess(engine, role, **settings)
        processes.append(process)
        return process

    yield open_one
    for process in processes:
        process.end()


NEEDS_MOONCAKE = pytest.mark.skipif(not find_spec("mooncake"), reason="install kvgrpc[mooncake-cpu] for it")


# For more rooms at a time than there are pages, which all get the same bytes into them.
SHARE_PAGES = {"check_pages": False}


@pytest.fixture(params=["shm", pytest.param("mooncake", marks=[pytest.mark.slow, NEEDS_MOONCAKE])])
def data_plane(request: pytest.FixtureRequest) -> str:
    """Shared memory; in the long run Mooncake too."""
    return str(request.param)


@pytest.fixture
def pair(start: Start, data_plane: str) -> tuple[RankProcess, RankProcess]:
    return opened_pair(start, data_plane)


def opened_pair(start: Start, data_plane: str, **settings: Any) -> tuple[RankProcess, RankProcess]:
    """A prefill with an embedded registry, and a decode."""
    prefill = start("P", "PREFILL", registry="embedded", data_plane=data_plane, **settings)
    decode = start("D", "DECODE", data_plane=data_plane, **settings)
    prefill.opened(), decode.opened()
    prefill.call("fill", 1)
    return prefill, decode


def random_pages(seed: int, count: int) -> list[int]:
    return [int(page) for page in np.random.default_rng(seed).permutation(PAGES)[:count]]


BOTH_PLANES = pytest.mark.parametrize("data_plane", ["shm", pytest.param("mooncake", marks=NEEDS_MOONCAKE)])


def no_open_writes(prefill: RankProcess) -> bool:
    return bool(prefill.call("open_writes") == 0)


def prefill_sees(prefill: RankProcess, rooms: int) -> None:
    wait_until(lambda: prefill.call("rooms_open") >= rooms)
