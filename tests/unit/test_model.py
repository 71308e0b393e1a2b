"""What a rank, a layout and a pool may be, at the edges; every wrong field is named."""

from __future__ import annotations

import dataclasses
import gc
import pickle
from typing import Any

import numpy as np
import pytest

from kvgrpc.errors import InvalidRequest, Violation
from kvgrpc.model import (
    MAX_REGIONS,
    MAX_WORD_CHARS,
    Attention,
    Layout,
    ModelIdentity,
    Pool,
    PoolKind,
    RankId,
    Region,
    Regions,
    raise_if,
)
from kvgrpc.model import check_pools as check

REGION = Region(0, "k", 4096, 64, 64)
POOL = Pool("kv", PoolKind.KV, 16, 4, "float16", (REGION,))
NARROW = 2**32


def pool(**changes: Any) -> Pool:
    return dataclasses.replace(POOL, **changes)


def region(**changes: Any) -> Pool:
    return pool(regions=(REGION, REGION._replace(component="v", address=8192, **changes)))


def wrong_fields(*pools: Pool) -> list[str]:
    with pytest.raises(InvalidRequest) as refused:
        check(pools)
    return [violation.field for violation in refused.value.violations]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (pool(name=""), "pools[0].name"),
        (pool(name="n" * 129), "pools[0].name"),
        (pool(pages=0), "pools[0].pages"),
        (pool(pages=NARROW), "pools[0].pages"),
        (pool(page_tokens=0), "pools[0].page_tokens"),
        (pool(regions=()), "pools[0].regions"),  # of a rank that has no other
        (pool(dtype="d" * (MAX_WORD_CHARS + 1)), "pools[0].dtype"),
        (pool(axes="a" * 257), "pools[0].axes"),
        (pool(location="l" * (MAX_WORD_CHARS + 1)), "pools[0].location"),
        (pool(heads_total=NARROW), "pools[0].heads_total"),
        (pool(head_start=-1), "pools[0].head_start"),
        (pool(head_count=NARROW), "pools[0].head_count"),
        (region(layer=NARROW), "pools[0].regions[1].layer"),
        (region(layer=-1), "pools[0].regions[1].layer"),
        (pool(regions=(REGION._replace(component=""),)), "pools[0].regions[0].component"),
        (pool(regions=(REGION, REGION._replace(address=8192))), "pools[0].regions[1]"),
        (region(page_bytes=0), "pools[0].regions[1].page_bytes"),
        (region(page_bytes=65), "pools[0].regions[1].page_bytes"),
        (pool(regions=(REGION._replace(address=0),)), "pools[0].regions[0].address"),
        (pool(regions=(REGION._replace(address=2**64 - 4 * 64 + 1),)), "pools[0].regions[0].address"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pool_that_cannot_be_right_names_the_field(wrong: Pool, field: str) -> None:
    assert wrong_fields(wrong) == [field]


def test_a_layout_without_sizes_is_one_rank_and_a_pool_without_heads_has_none() -> None:
    assert Layout() == Layout(1, 1, 1, 1)
    assert (POOL.heads_total, POOL.head_start, POOL.head_count) == (0, 0, 0)


def test_pools_have_names_of_their_own_and_a_bound_together() -> None:
    assert wrong_fields(POOL, POOL) == ["pools[1].name"]
    regions = tuple(REGION._replace(layer=layer, address=4096 * (layer + 1)) for layer in range(MAX_REGIONS))
    check([pool(regions=regions)])
    assert wrong_fields(pool(regions=regions), pool(name="more")) == ["pools"]


def test_what_is_just_right_is_taken() -> None:
    check([pool(name="n" * 128, dtype="d" * MAX_WORD_CHARS, axes="a" * 256, location="l" * MAX_WORD_CHARS)])
    check([pool(kind=PoolKind.STATE, page_tokens=0)])
    check([pool(regions=(), dtype="", axes=""), pool(name="of this stage's layers")])
    check([pool(regions=())], of_a_rank=False)
    check([pool(page_tokens=1)])
    check([pool(pages=NARROW - 1), pool(name="b", heads_total=NARROW - 1), pool(name="c", head_start=0, pages=1)])
    check([region(layer=NARROW - 1, page_bytes=1)])
    check([pool(regions=(REGION._replace(address=2**64 - 4 * 64),))])
    check([pool(regions=(REGION._replace(address=1),))])
    check([POOL.without_addresses()], addresses=False)
    assert POOL.without_addresses().regions[0].address == 0


def test_regions_may_lie_in_each_others_gaps_and_share_no_byte() -> None:
    """The key and the value of one tensor: a page of each, in turns."""
    key, value = Region(0, "k", 4096, 128, 64), Region(0, "v", 4160, 128, 64)
    check([pool(regions=(key, value))])
    check([pool(regions=(value, key))])
    for page_bytes, start, stride in ((65, 4096, 128), (64, 4097, 128), (64, 4096, 64)):
        crossing = key._replace(page_bytes=page_bytes, address=start, page_stride_bytes=max(stride, page_bytes))
        assert wrong_fields(pool(regions=(crossing, value)))
    # The last byte of a page and the first one of the next pool of pages touch, and no more.
    check([pool(regions=(REGION, Region(0, "v", 4096 + 4 * 64, 64, 64)))])
    assert wrong_fields(pool(regions=(REGION, Region(0, "v", 4096 + 4 * 64 - 1, 64, 64))))


def test_a_region_whose_pages_reach_into_another_ones_next_page_names_that_one() -> None:
    key = REGION._replace(address=4096, page_bytes=100, page_stride_bytes=200)
    value = key._replace(component="v", address=4196, page_bytes=101)
    with pytest.raises(InvalidRequest) as refused:
        check([pool(regions=(value, key))])
    assert refused.value.metadata["field"] == "pools[0].regions[0].address"
    assert refused.value.metadata["rule"].endswith("those of regions[1]")


def test_of_regions_with_two_strides_the_later_one_is_refused() -> None:
    key = REGION._replace(address=4096, page_bytes=10, page_stride_bytes=200)
    value = key._replace(component="v", address=4196, page_stride_bytes=400)
    assert wrong_fields(pool(regions=(key, value))) == ["pools[0].regions[1].address"]


def test_what_is_wrong_is_said_with_its_value_where_it_has_one() -> None:
    with pytest.raises(InvalidRequest) as refused:
        raise_if([Violation("pages", "at least 1", 0), Violation("name", "there", None)])
    assert refused.value.message == "pages: must be at least 1, not 0; name: must be there"


@pytest.mark.parametrize("axis", ["dp", "pp", "cp", "tp"])
def test_a_layout_has_the_ranks_below_each_of_its_sizes(axis: str) -> None:
    layout = Layout(dp=2, pp=3, cp=5, tp=7)
    assert layout.ranks == 210
    last = RankId("engine", 1, 2, 4, 6)
    assert last in layout
    assert last._replace(**{axis: getattr(layout, axis)}) not in layout


def test_models_differ_only_where_both_say_something() -> None:
    model = ModelIdentity("m", "1", attention=Attention.MLA)
    assert dict(model.items()) == {
        **{"model.name": "m", "model.revision": "1", "model.cache_dtype": "", "model.attention": "MLA"}
    }
    assert dict(ModelIdentity().items())["model.attention"] == ""
    assert model.differences(ModelIdentity("m", "2")) == {"model.revision": ("1", "2")}


def test_a_pool_of_arrays_has_no_heads_unless_they_are_said() -> None:
    made = Pool.from_arrays([np.zeros((4, 64), dtype=np.uint8)], page_tokens=16)
    assert (made.heads_total, made.head_start, made.head_count) == (0, 0, 0)
    one = Pool.from_arrays([np.zeros((1, 64), dtype=np.uint8)], page_tokens=16)
    assert (one.pages, one.regions[0].page_stride_bytes) == (1, 64)


def test_pages_with_gaps_between_them_keep_their_stride() -> None:
    two = Pool.from_arrays([np.zeros((4, 64), dtype=np.uint8)[::2]], page_tokens=16)
    assert (two.pages, two.regions[0].page_stride_bytes, two.regions[0].page_bytes) == (2, 128, 64)


class TestRegions:
    REGIONS = tuple(Region(n, "kv"[n % 2], 2**64 - 1 - n, 64, 32) for n in range(MAX_REGIONS))

    def test_they_are_the_regions_that_were_given(self) -> None:
        regions = dataclasses.replace(POOL, regions=self.REGIONS).regions
        assert isinstance(regions, Regions) and len(regions) == MAX_REGIONS
        assert tuple(regions) == self.REGIONS and tuple(regions[3:9:2]) == self.REGIONS[3:9:2]
        assert regions[-1] == self.REGIONS[-1] and self.REGIONS[7] in regions and REGION not in regions
        assert regions == Regions(self.REGIONS) != Regions(self.REGIONS[:-1])
        assert hash(regions) == hash(Regions(self.REGIONS)) and pickle.loads(pickle.dumps(regions)) == regions
        assert repr(Regions([REGION])) == f"Regions([{REGION!r}])"
        with pytest.raises(IndexError):
            regions[MAX_REGIONS]

    def test_a_collection_of_garbage_does_not_look_at_each(self) -> None:
        """A full one took 0.1 s where a registry held a million of them."""
        seen = len(gc.get_objects())
        pools = [dataclasses.replace(POOL, regions=[*self.REGIONS]) for _ in range(20)]
        assert len(gc.get_objects()) - seen < len(pools) * MAX_REGIONS / 10

    @pytest.mark.parametrize(
        "wrong", [REGION._replace(layer=-1), REGION._replace(address=2**64), (0, "k", 4096, 64, 64)]
    )
    def test_what_no_region_can_be_stays_as_it_was_said(self, wrong: Any) -> None:
        assert dataclasses.replace(POOL, regions=(wrong,)).regions == (wrong,)
