"""Which prefix every group of a cache can use, beside the rule tried for each length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.events.following.groups import CacheGroup, usable
from tests.support.cache_groups import serves

PAGE = 16
HASHES = list(range(100, 124))
groups = st.dictionaries(
    st.integers(1, 3),
    st.builds(
        CacheGroup,
        st.sampled_from(["full_attention", "sliding_window", "mamba", "cross_attention", ""]),
        st.sampled_from([1, 16, 17, 40, 100]),
        st.sampled_from([0, PAGE, 2 * PAGE]),
    ),
    max_size=3,
)


@given(
    st.integers(0, len(HASHES)),
    groups,
    st.dictionaries(st.integers(1, 3), st.sets(st.sampled_from(HASHES)), min_size=3),
    st.booleans(),
)
def test_the_longest_prefix_that_all_groups_can_use_is_found(
    prefix: int, needed: dict[int, CacheGroup], held: dict[int, set[int]], dense: bool
) -> None:
    if dense:
        held = {number: set(HASHES) - blocks for number, blocks in held.items()}

    def holds(group: int, block: int) -> bool:
        return block in held[group]

    right = next(
        length
        for length in range(prefix, -1, -1)
        if all(serves(length, group, HASHES, held[number], PAGE) for number, group in needed.items())
    )
    assert usable(prefix, PAGE, HASHES, 0, needed, holds) == right


def test_a_long_prompt_is_looked_at_a_few_times_and_not_once_for_each_length() -> None:
    """A state that is nowhere, beside a group that has all: two million looks at 2,000 blocks, on the index's loop."""
    hashes = list(range(2000))
    looks = 0

    def holds(group: int, block: int) -> bool:
        nonlocal looks
        looks += 1
        return group == 1

    needed = {1: CacheGroup("full_attention", 0, PAGE), 2: CacheGroup("mamba", 0, PAGE)}
    assert usable(len(hashes), PAGE, hashes, 0, needed, holds) == 0
    assert looks <= 3 * len(hashes)
