"""What peers dial, from what is bound and what is advertised."""

from __future__ import annotations

import pytest

from kvgrpc.server.addresses import advertised, split


@pytest.mark.parametrize(
    ("bound", "advertise", "dialled"),
    [
        ("127.0.0.1:9", "", "127.0.0.1:9"),
        ("[::]:9", "fd00::5", "[fd00::5]:9"),
        ("[::]:9", "[fd00::5]", "[fd00::5]:9"),
        ("[::]:9", "[fd00::5]:7", "[fd00::5]:7"),
        ("0.0.0.0:9", "host-a", "host-a:9"),
        ("0.0.0.0:9", "host-a:7", "host-a:7"),
    ],
)
def test_the_bound_port_unless_the_advertised_one_names_its_own(bound: str, advertise: str, dialled: str) -> None:
    assert advertised(bound, advertise) == dialled


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("fd00::5", ("fd00::5", "")),
        ("[fd00::5]", ("fd00::5", "")),
        ("[fd00::5]:7", ("fd00::5", "7")),
        ("10.0.0.7", ("10.0.0.7", "")),
        ("10.0.0.7:7", ("10.0.0.7", "7")),
        (":7", ("", "7")),
    ],
)
def test_an_ipv6_address_stays_whole(address: str, parts: tuple[str, str]) -> None:
    assert split(address) == parts
