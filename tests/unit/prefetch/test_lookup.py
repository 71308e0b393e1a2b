"""What a Lookup says of an engine with a radix cache of its own: what its keeper knows, tier by tier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvgrpc.model import RankId, RankRef
from kvgrpc.prefetch.config import PrefetchConfig
from kvgrpc.prefetch.manager import PrefetchManager
from kvgrpc.prefetch.model import NotEnoughPages, OperationState, Stop
from kvgrpc.prefetch.pools.pages import Pages
from kvgrpc.prefetch.tree.keeper import Keeper, Landed
from tests.support.controller_rig import LIMITS, SHAPE, Rig, hashes, rig
from tests.support.faults.storage import memory_backend

__all__ = ["rig"]


class RadixCache:
    """An engine's own tree, which has the first pages of everything."""

    def __init__(self, near: int) -> None:
        self.near = near

    def leading(self, hashes: Sequence[str]) -> int:
        return min(self.near, len(hashes))

    def reserve(self, count: int, behind: Sequence[str]) -> Pages | NotEnoughPages:
        return NotEnoughPages(count)

    def keep(self, hashes: Sequence[str], covered: int, pages: Pages, extra_key: str) -> int:
        return 0

    def pages_of(self, hashes: Sequence[str]) -> Pages:
        return np.empty(0, dtype=np.int64)


class TieredRadixCache(RadixCache):
    """One that tells device and host apart."""

    def leading_by_tier(self, hashes: Sequence[str]) -> tuple[int, int]:
        return 3, self.leading(hashes)


@pytest.mark.parametrize(
    ("keeper", "expected"), [(RadixCache(5), (0, 5, 5)), (TieredRadixCache(5), (3, 5, 5)), (None, (0, 0, 0))]
)
def test_the_engines_keeper_is_asked_tier_by_tier(keeper: Keeper | None, expected: tuple[int, int, int]) -> None:
    config = PrefetchConfig(
        model="test/model",
        shape=SHAPE,
        host_pages=8,
        limits=LIMITS,
        own_radix_cache=True,
        keeper=keeper,
        storage=memory_backend(),
    )
    manager = PrefetchManager(config, RankRef(RankId("E"), 1))
    assert manager.lookup(hashes(5), 5.0) == expected
    assert manager.close(10.0)


def test_what_waits_for_an_engine_is_covered_until_it_is_taken(rig: Rig) -> None:
    names = rig.stored(hashes(8))
    assert rig.ended(rig.controller.prefetch(names)).state is OperationState.DONE
    reads = sum(call == "read" for call, _ in rig.storage.calls)
    again = rig.ended(rig.controller.prefetch(names))
    assert (again.state, again.stop) == (OperationState.DECLINED, Stop.COVERED)
    assert sum(call == "read" for call, _ in rig.storage.calls) == reads, "no page is read twice"
    assert rig.queue.leading_by_tier([*names[:5], *hashes(3, "other")]) == (0, 5)
    assert rig.queue.leading_by_tier(hashes(3, "other")) == (0, 0)
    assert rig.take() == names
    assert rig.queue.leading(names) == 0, "what was taken is the engine's to know"


def test_a_longer_prompt_stands_on_nothing_that_may_be_given_up(rig: Rig) -> None:
    names = rig.stored(hashes(12))
    assert rig.ended(rig.controller.prefetch(names[:8])).state is OperationState.DONE
    longer = rig.ended(rig.controller.prefetch(names))
    assert (longer.covered, longer.completed) == (0, 12)
    landed: list[Landed] = rig.queue.take()
    assert [each.covered for each in landed] == [0, 0]
    for each in landed:
        rig.host.table.release(each.pages)
