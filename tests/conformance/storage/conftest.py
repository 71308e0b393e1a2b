"""One Mooncake Store for all tests of the suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvgrpc.errors import FeatureDisabled
from kvgrpc.prefetch.storage.mooncake.local import LocalStore


@pytest.fixture(scope="session")
def mooncake_store() -> Iterator[LocalStore]:
    try:
        with LocalStore(owners=2) as store:
            yield store
    except FeatureDisabled as error:
        pytest.skip(error.message)
