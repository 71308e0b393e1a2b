"""Addresses of engines; engine_name and registry_of are in test_sglang_rank.py."""

from __future__ import annotations

import pytest

from kvgrpc.engines.addresses import for_rank
from kvgrpc.errors import InvalidRequest


@pytest.mark.parametrize(
    ("listen", "dp", "address"),
    [
        ("127.0.0.1:5558", 0, "127.0.0.1:5558"),
        ("127.0.0.1:5558", 3, "127.0.0.1:5561"),
        ("[::1]:5558", 1, "[::1]:5559"),
        ("127.0.0.1:0", 3, "127.0.0.1:0"),
        ("unix:/events", 0, "unix:/events"),
    ],
)
def test_each_dp_rank_of_an_engine_serves_its_events_at_a_port_of_its_own(listen: str, dp: int, address: str) -> None:
    assert for_rank(listen, dp) == address


@pytest.mark.parametrize(
    ("listen", "dp"), [("nohost", 0), ("nohost", 1), ("h:x", 1), ("h:", 1), ("h:65535", 1), ("unix:/events", 1)]
)
def test_where_events_cannot_be_served_is_named(listen: str, dp: int) -> None:
    with pytest.raises(InvalidRequest, match="events_listen: must be host:port"):
        for_rank(listen, dp)
