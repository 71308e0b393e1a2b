"""Whom a request allows to be asked for its chunks, in the three spellings that routers have. No import of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from kvgrpc.net import joined
from kvgrpc.observability.logging import RateLimited, one_line

MOST_SOURCES = 64
FETCH, FETCH_VERSIONS = "kv.fetch", "1."

_lines = RateLimited(logging.getLogger("vllm." + __name__))


def engines_of(context: Any) -> Collection[str] | None:
    """Names of engines or "host:port" of their caches; None: whoever there is.

    Of a request's ``kv_transfer_params``: our own ``pull_from``, a list of both; ``remote_kv_source`` as llm-d's
    sidecar sends it; of its ``kv_hints``, or of ``kv_hint`` among the parameters: actions ``kv.fetch@1.x`` as
    Dynamo's router makes them. What cannot be read is said in the log and asks whoever there is.
    """
    given = context.kv_transfer_params or {}
    names = given.get("pull_from")
    if isinstance(names, (list, tuple)):
        return tuple(each for each in names[:MOST_SOURCES] if isinstance(each, str))
    if "pull_from" in given:
        _ignored("pull_from", names, "a list of engines' names or addresses")
    source = given.get("remote_kv_source")
    if isinstance(source, Mapping) and source.get("remote_host"):
        return (joined(str(source["remote_host"]), str(source.get("remote_port", ""))),)
    if source is not None:
        _ignored("remote_kv_source", source, "remote_host and remote_port")
    return _hinted(getattr(context, "kv_hints", None)) or _hinted(given.get("kv_hint"))


def _hinted(envelope: Any) -> Collection[str] | None:
    """Actions of other types are other components', and no word for us."""
    actions = _field(envelope, "actions")
    if not isinstance(actions, (list, tuple)):
        return None
    fetches = [each for each in actions[:MOST_SOURCES] if _field(each, "action_type") == FETCH]
    found = [address for address in map(_address, fetches) if address]
    return tuple(found) or None


def _address(action: Any) -> str:
    """The control endpoint of a ``kv.fetch``: "tcp://host:port" or "host:port"."""
    version = _field(action, "action_version")
    if not str(version).startswith(FETCH_VERSIONS):
        _ignored("action_version", version, f"{FETCH_VERSIONS}x")
        return ""
    endpoint = _field(_field(action, "payload"), "source_control_endpoint")
    if not isinstance(endpoint, str) or not endpoint:
        _ignored("source_control_endpoint", endpoint, "host:port of the engine's cache")
        return ""
    return endpoint.rpartition("://")[2]


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _ignored(field: str, value: object, rule: str) -> None:
    _lines.warning(field, f"kvgrpc: a request's {field} is {one_line(repr(value))[:100]}, not {rule}: it is ignored")
