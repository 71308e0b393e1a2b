"""caller_address: what operators read of ServicerContext.peer()."""

from __future__ import annotations

import pytest

from kvgrpc.rpc.callers import caller_address


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.2:4312", "10.0.0.2:4312"),
        ("ipv6:%5B::1%5D:80", "[::1]:80"),
        ("unix:/run/kvgrpc.sock", "unix:/run/kvgrpc.sock"),
        ("", ""),
    ],
)
def test_a_caller_is_shown_as_addresses_are_written(peer: str, address: str) -> None:
    assert caller_address(peer) == address
