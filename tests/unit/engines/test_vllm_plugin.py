"""The general plug-in, which vLLM loads in each of its processes; without vLLM. tests/engines has the rest."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from kvgrpc.engines import vllm_plugin


def test_vllm_finds_it_by_its_entry_point() -> None:
    (found,) = metadata.entry_points(group="vllm.general_plugins", name="kvgrpc")
    assert found.load() is vllm_plugin.register


def test_without_the_variable_it_does_nothing_and_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_plugin.LISTEN, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import would fail
    vllm_plugin.register()
