"""What every test stands on: no setting of the developer's own shell reaches a test."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_settings_from_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVGRPC_"):
            monkeypatch.delenv(name)
