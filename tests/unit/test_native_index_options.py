"""What ``NativePrefixIndex`` refuses before it starts anything."""

from __future__ import annotations

import pytest

from kvgrpc.client import ClientSecurity, NativePrefixIndex, native_index
from kvgrpc.errors import FeatureDisabled, InvalidRequest


async def test_a_program_that_is_not_installed_is_named_with_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_index, "native_index_program", lambda: None)
    index = NativePrefixIndex(registry="127.0.0.1:8998")
    with pytest.raises(FeatureDisabled, match="kvgrpc-index is not installed") as refused:
        await index.start()
    assert refused.value.metadata["howToEnable"] == "make native"
    assert not index.healthy
    with pytest.raises(RuntimeError, match="was not started"):
        _ = index.client
    await index.close()


def test_what_is_no_address_is_refused_with_its_field() -> None:
    for options, field in (
        ({"registry": "127.0.0.1"}, "registry"),
        ({"sources": ["127.0.0.1:1", "nowhere"]}, "sources[1]"),
        ({}, "registry"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            NativePrefixIndex(**options)
        assert refused.value.violations[0].field == field


def test_what_the_program_has_no_option_for_is_refused() -> None:
    security = ClientSecurity(ca_file="ca.pem", cert_file="own.pem", key_file="own.key")
    with pytest.raises(FeatureDisabled) as refused:
        NativePrefixIndex(registry="127.0.0.1:8998", security=security)
    assert refused.value.metadata["feature"] == "security.cert_file"
