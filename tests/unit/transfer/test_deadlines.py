"""Deadlines say what a dict of due ticks would say, and keep nothing of what is over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.transfer.protocol.timers import Deadlines

actions = st.lists(st.tuples(st.sampled_from(["set", "clear"]), st.integers(0, 5), st.integers(1, 8)), max_size=6)


@given(st.lists(actions, max_size=12))
def test_it_equals_a_dict(ticks: list[list[tuple[str, int, int]]]) -> None:
    deadlines, naive = Deadlines[int](), dict[int, int]()
    for now, chosen in enumerate([*ticks, *([] for _ in range(9))]):
        for action, key, delay in chosen:
            if action == "set":
                deadlines.set(key, now + delay)
                naive[key] = now + delay
            else:
                deadlines.clear(key)
                naive.pop(key, None)
        due = {key for key, tick in naive.items() if tick == now}
        assert set(deadlines.due(now)) == due
        naive = {key: tick for key, tick in naive.items() if tick != now}
        assert len(deadlines) == len(naive)
    assert not deadlines._keys and not deadlines._ticks
