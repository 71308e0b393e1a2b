"""Addresses of engines; engine_name and registry_of are in test_sglang_rank.py."""

from __future__ import annotations

import pytest

from kvgrpc.engines.addresses import for_rank


@pytest.mark.parametrize(
    ("listen", "dp", "address"),
    [
        ("127.0.0.1:5558", 0, "127.0.0.1:5558"),
        ("127.0.0.1:5558", 3, "127.0.0.1:5561"),
        ("[::1]:5558", 1, "[::1]:5559"),
        ("127.0.0.1:0", 3, "127.0.0.1:0"),
    ],
)
def test_each_dp_rank_of_an_engine_serves_its_events_at_a_port_of_its_own(listen: str, dp: int, address: str) -> None:
    assert for_rank(listen, dp) == address
