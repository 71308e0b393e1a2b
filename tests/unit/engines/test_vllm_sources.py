"""Whom a request to vLLM names to pull from, in each spelling of routers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvgrpc.engines.vllm.offload.sources import MOST_SOURCES, engines_of


class Action(msgspec.Struct, frozen=True):
    """As vLLM 0.33.0 decodes it."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class Envelope(msgspec.Struct, frozen=True):
    protocol_version: str
    message_id: str
    actions: list[Action]


def hint(endpoint: object = "tcp://10.0.0.1:5600", kind: str = "kv.fetch", version: str = "1.0") -> Envelope:
    payload = {"source_control_endpoint": endpoint, "block_hashes": [1, 2]}
    return Envelope("1.0", "m", [Action("a", kind, version, payload)])


def asked(parameters: dict[str, Any] | None = None, hints: Envelope | None = None) -> object:
    return engines_of(SimpleNamespace(kv_transfer_params=parameters, kv_hints=hints))


@pytest.mark.parametrize(
    ("parameters", "hints", "expected"),
    [
        (None, None, None),
        ({"pull_from": ["P0", "10.0.0.1:5600", 7]}, None, ("P0", "10.0.0.1:5600")),
        ({"pull_from": []}, None, ()),
        ({"remote_kv_source": {"remote_host": "10.0.0.1", "remote_port": 5600}}, None, ("10.0.0.1:5600",)),
        ({"remote_kv_source": {"remote_host": "fd00::1", "remote_port": "5600"}}, None, ("[fd00::1]:5600",)),
        (None, hint(), ("10.0.0.1:5600",)),
        (None, hint("10.0.0.1:5600", version="1.3"), ("10.0.0.1:5600",)),
        ({"kv_hint": msgspec.to_builtins(hint())}, None, ("10.0.0.1:5600",)),
        ({"pull_from": ["P0"]}, hint(), ("P0",)),
        (None, hint(kind="kv.evict"), None),
    ],
)
def test_each_spelling_names_the_same_engine(parameters: Any, hints: Any, expected: object) -> None:
    assert asked(parameters, hints) == expected


@pytest.mark.parametrize(
    ("parameters", "hints", "field"),
    [
        ({"pull_from": "P0"}, None, "pull_from"),
        ({"remote_kv_source": 7}, None, "remote_kv_source"),
        ({"remote_kv_source": {"remote_port": 1}}, None, "remote_kv_source"),
        (None, hint(version="2.0"), "action_version"),
        (None, hint(endpoint=7), "source_control_endpoint"),
    ],
)
def test_what_cannot_be_read_asks_whoever_there_is_and_is_said(
    parameters: Any, hints: Any, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert asked(parameters, hints) is None
    assert field in caplog.text


def test_a_request_cannot_name_engines_without_end() -> None:
    found = asked({"pull_from": [f"P{number}" for number in range(1000)]})
    assert isinstance(found, tuple) and len(found) == MOST_SOURCES
