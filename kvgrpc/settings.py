"""Settings: keywords, else ``KVGRPC_<NAME>`` of the environment, else the TOML file that ``KVGRPC_CONFIG`` names.

The keys of the file are the same names in lower case. Nothing that is misspelt is passed over in silence.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, get_origin

import msgspec

from kvgrpc.errors import InvalidRequest

PREFIX = "KVGRPC_"
CONFIG = "config"
# Read elsewhere: by the command, by adapters of engines, by tests.
OTHERS = (
    *("server", "timeout", "log_level", CONFIG, "sglang", "vllm", "events_listen", "model_name", "store", "test_seed"),
    *("etcd", "etcd_prefix", "etcd_ca_file", "etcd_cert_file", "etcd_key_file"),
)
# Options of the command's subcommands: KVGRPC_ROOMS_HELD.
COMMAND_PREFIXES = (
    *("demo_", "serve_", "engines_", "ranks_", "sessions_", "rooms_", "room_", "cancel_", "streams_", "events_"),
    *("prefetch_", "cache_", "topology_", "info_", "health_", "drain_", "token_", "doctor_"),
    *("why_", "caches_", "pulls_", "top_", "view_"),
)
# Those of them that are as near to a setting as a misspelt one, and right for all that.
COMMAND_OPTIONS = (
    *("demo_data_plane", "health_cert_file", "info_server_name", "info_token_file"),
    *("room_server_name", "room_token_file"),
    *("top_audience", "top_cert_file", "top_insecure", "top_key_file", "top_server_name", "top_token_file"),
    *("view_server_name", "view_token_file"),
    *("why_audience", "why_cert_file", "why_insecure", "why_key_file", "why_server_name", "why_token_file"),
)
_LARGEST_FILE_BYTES = 1 << 20
_NEAR = 0.8
_SHOWN = 200

_log = logging.getLogger(__name__)


def layered(kinds: Mapping[str, Any], keywords: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, Any]:
    """What was set, converted to its kind: str, int, float, bool, an enum by its name, a tuple of text (with commas),
    a dataclass (a table of the file, JSON in text), or object (as it is).

    Keywords that are no text stay as they are. Raises InvalidRequest for a key that is none, with the nearest that is
    one, and for a value that cannot be read; a variable is refused where it is near a name of ours, and only said in
    the log where it is like nothing.
    """
    found: dict[str, Any] = {}
    path = environment.get(PREFIX + CONFIG.upper())
    for name, value in (_file(path) if path else {}).items():
        if name not in kinds:
            raise _unknown(name, name, kinds)
        found[name] = convert(name, value, kinds[name])
    for variable, text in environment.items():
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and variable == variable.upper():
            if name in kinds:
                found[name] = convert(name, text, kinds[name])
            elif name not in OTHERS:
                _misspelt(variable, name, kinds)
    for name, value in keywords.items():
        if name not in kinds:
            raise _unknown(name, name, kinds)
        found[name] = convert(name, value, kinds[name]) if isinstance(value, str) else value
    return found


def convert(name: str, value: object, kind: Any) -> Any:
    """``value`` as a ``kind``; see ``layered``. Raises InvalidRequest naming the setting, its value and the rule."""
    try:
        if kind is object or (kind is str and isinstance(value, str)):
            return value
        if kind is bool and isinstance(value, str):
            return _FLAGS[value.strip().lower()]
        if get_origin(kind) is tuple and isinstance(value, str):
            return tuple(item.strip() for item in value.split(",") if item.strip())
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return _table(name, msgspec.json.decode(value) if isinstance(value, str) else value, kind)
        if isinstance(kind, type) and hasattr(kind, "__members__"):
            return kind.__members__[str(value).strip().upper()]
        return msgspec.convert(value.strip() if isinstance(value, str) else value, kind, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError, KeyError, ValueError, RecursionError):
        raise InvalidRequest.of(name, str(value)[:_SHOWN], _rule(kind)) from None


def is_near(name: str, kinds: Iterable[str]) -> bool:
    """Whether ``name`` is like one of ``kinds``, or of what is read elsewhere, but for a letter or a short word."""
    return bool(difflib.get_close_matches(name, [*kinds, *OTHERS], 1, _NEAR))


def _table(name: str, value: object, kind: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(name)
    known = {each.name for each in dataclasses.fields(kind)}
    for key in value:
        if key not in known:
            raise _unknown(f"{name}.{key}", str(key), known)
    return msgspec.convert(dict(value), kind, strict=False)


def _file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
        if len(content) > _LARGEST_FILE_BYTES:
            raise OSError(None, f"larger than {_LARGEST_FILE_BYTES} bytes")
        found = msgspec.toml.decode(content)
    except OSError as error:
        raise InvalidRequest.of(CONFIG, path, f"a file that can be read ({error.strerror})") from None
    except ImportError:
        raise InvalidRequest.of(CONFIG, path, "left out, or Python 3.11 or newer (or the package tomli)") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest.of(CONFIG, path, f"a TOML file ({error})") from None
    return dict(found)


def refuse_misspelt(variable: str, kinds: Collection[str]) -> None:
    """Raises InvalidRequest for a variable of the environment that is nearly one of ours, and none."""
    name = variable.removeprefix(PREFIX).lower()
    if name not in (*kinds, *OTHERS, *COMMAND_OPTIONS) and is_near(name, kinds):
        raise _unknown(variable, name, [*kinds, *OTHERS])


def _misspelt(variable: str, name: str, kinds: Collection[str]) -> None:
    refuse_misspelt(variable, kinds)
    if name.startswith(COMMAND_PREFIXES):
        _log.info("%s is for the command kvgrpc, and has no effect on a rank", variable)
    else:
        _log.warning("%s is no setting of kvgrpc and has no effect", variable)


def _unknown(field: str, name: str, kinds: Iterable[str]) -> InvalidRequest:
    """Without its value, which may be a token."""
    near = difflib.get_close_matches(name, list(kinds), 1, 0.6)
    rule = f"{near[0]} perhaps" if near else f"one of the settings {', '.join(sorted(kinds))}"
    return InvalidRequest.of(field, field, rule)


def _rule(kind: Any) -> str:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return f"a table (JSON in text) of {', '.join(each.name for each in dataclasses.fields(kind))}"
    if isinstance(kind, type) and hasattr(kind, "__members__"):
        return " or ".join(member.lower() for member in kind.__members__)
    if get_origin(kind) is tuple:
        return "a list of text"
    return _RULES.get(kind, "text")


_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
_RULES: dict[Any, str] = {bool: "true or false", float: "a number", int: "a whole number"}
