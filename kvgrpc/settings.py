"""Settings: keywords, else ``KVGRPC_<NAME>`` of the environment, else the TOML file that ``KVGRPC_CONFIG`` names.

The keys of the file are the same names in lower case. ``kvgrpc.fields`` says what a value may be. Nothing that is
misspelt is passed over in silence.
"""

from __future__ import annotations

import difflib
import enum
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from kvgrpc.errors import InvalidRequest, Violation
from kvgrpc.fields import bare, has_fields, is_right, kinds_of, names_of, required_of, rule_of
from kvgrpc.model import raise_if

PREFIX = "KVGRPC_"
CONFIG = "config"
_LARGEST_FILE_BYTES = 1 << 20
_NEAR = 0.8
_SHOWN = 200
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

_log = logging.getLogger(__name__)
T = TypeVar("T")


class OtherVariables(msgspec.Struct):
    """Variables that something else than a rank's own settings reads."""

    config: str
    """The TOML file of settings."""
    server: str
    """Whom the command ``kvgrpc`` asks: HOST:PORT or unix:/path."""
    timeout: float
    """Seconds that an answer to the command may take."""
    log_level: str
    """What servers of the command log: ``debug``, ``info``, ``warning`` or ``error``."""
    log_format: str
    """``text``, or ``json`` for a line of JSON each."""
    etcd: str
    """Endpoints of the etcd that a registry keeps its rows in."""
    etcd_prefix: str
    """Before each of its keys."""
    etcd_ca_file: str
    """Who signs etcd's certificate."""
    etcd_cert_file: str
    """The registry's own certificate towards etcd."""
    etcd_key_file: str
    """Its key."""
    events_listen: str
    """HOST:PORT at which an engine's own event publisher is served (docs/publish-events.md)."""
    cache_listen: str
    """HOST:PORT at which an SGLang engine takes orders for its cache (docs/engines/sglang.md)."""
    sglang: str
    """How SGLang gets its transfer backend: ``backend`` or ``mooncake`` (docs/engines/sglang.md)."""
    untried: str
    """What an engine hands over although nobody has seen it work (docs/engines/sglang.md, docs/engines/vllm.md)."""
    model_name: str
    """What the model of an engine is called, where its path differs from host to host."""
    store: str
    """Where ``kvgrpc serve registry`` keeps its rows."""
    test_seed: str
    """Used by tests."""


OTHERS = names_of(OtherVariables)


def layered(kinds: Mapping[str, Any], keywords: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings that were given, each value as its kind. Keywords that are no text stay as they are.

    Raises InvalidRequest for a key that is none, with the nearest that is one, and for a value that cannot be read or
    is out of bounds. A variable is refused where it is near a name of ours, and only said in the log otherwise.
    """
    path = environment.get(PREFIX + CONFIG.upper())
    found = read_file(kinds, path) if path else {}
    for variable, text in environment.items():
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and variable == variable.upper():
            if name in kinds:
                found[name] = convert(name, text, kinds[name])
            elif name not in OTHERS:
                refuse_misspelt(variable, kinds)
                _log.warning("%s is no setting of a rank and has no effect on one", variable)
    for name, value in keywords.items():
        if name not in kinds:
            raise _unknown(name, name, kinds)
        found[name] = convert(name, value, kinds[name]) if isinstance(value, str) else value
    return found


def read_file(kinds: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The settings of a TOML file, each value as its kind. Raises InvalidRequest that names all that is wrong."""
    found, wrong = dict[str, Any](), list[Violation]()
    for name, value in _content(path).items():
        try:
            if name not in kinds:
                raise _unknown(name, name, kinds)
            found[name] = convert(name, value, kinds[name])
        except InvalidRequest as error:
            wrong += error.violations
    raise_if(wrong)
    return found


def convert(name: str, value: object, kind: Any) -> Any:
    """``value``, text or what JSON and TOML have, as a ``kind`` of ``kvgrpc.fields``. ``object`` is taken as it is.

    Raises InvalidRequest naming the setting, its value and the rule.
    """
    base = _of_an_optional(bare(kind)[0])
    try:
        if isinstance(base, type) and has_fields(base):
            table = msgspec.json.decode(value) if isinstance(value, str) else value
            if not isinstance(table, Mapping):
                raise ValueError(name)
            return read(base, table, f"{name}.", lenient=True)
        found = _of_text(value, base)
    except (msgspec.ValidationError, msgspec.DecodeError, KeyError, ValueError, RecursionError):
        raise _wrong(name, value, kind) from None
    if not is_right(found, kind):
        raise _wrong(name, value, kind)
    return found


def read(kind: type[T], given: Mapping[str, Any], path: str = "", *, lenient: bool = False) -> T:
    """A thing with fields, of a mapping; ``lenient``: values may be text. Keys that end in ``_bytes`` also take "64MB".

    Raises InvalidRequest that names ``path`` and the key, its value and the rule.
    """
    kinds, found = kinds_of(kind), dict[str, Any]()
    for key, value in given.items():
        if key not in kinds:
            raise _unknown(f"{path}{key}", str(key), kinds)
        sized = _size(path + key, value) if key.endswith("_bytes") else value
        try:
            found[key] = convert(path + key, sized, kinds[key]) if lenient else msgspec.convert(sized, kinds[key])
        except msgspec.ValidationError:
            raise _wrong(path + key, value, kinds[key]) from None
    for name in required_of(kind):
        if name not in found:
            raise InvalidRequest.of(path + name, "nothing", f"given ({rule_of(kinds[name])})")
    return kind(**found)


def is_near(name: str, kinds: Iterable[str]) -> bool:
    """True if ``name`` is like one of ``kinds``, or of what is read elsewhere, but for a letter or a short word.

    One that ends in another, as ``room_token_file``, is somebody else's option and no misspelt one.
    """
    known = [*kinds, *OTHERS]
    if any(name.endswith(f"_{each}") for each in known):
        return False
    return bool(difflib.get_close_matches(name, known, 1, _NEAR))


def refuse_misspelt(variable: str, kinds: Collection[str]) -> None:
    """Raises InvalidRequest for a variable of the environment that is nearly one of ours, and none."""
    name = variable.removeprefix(PREFIX).lower()
    if name not in (*kinds, *OTHERS) and is_near(name, kinds):
        raise _unknown(variable, name, [*kinds, *OTHERS])


def _of_text(value: object, base: Any) -> Any:
    if get_origin(base) is tuple and isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    if base is object or (isinstance(value, str) and str in (base, *get_args(base))):
        return value
    if base is bool and isinstance(value, str):
        return _FLAGS[value.strip().lower()]
    if isinstance(base, type) and issubclass(base, enum.Enum):
        return base.__members__[str(value).strip().upper()]
    return msgspec.convert(value.strip() if isinstance(value, str) else value, base, strict=False)


def _of_an_optional(base: Any) -> Any:
    """Of "a table or None" the table."""
    return next((each for each in get_args(base) if has_fields(each)), base)


def _size(name: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    if (found := _SIZE.fullmatch(value)) is None:
        raise InvalidRequest.of(name, value, 'a number of bytes, or text as "64MB" or "1.5 GiB"')
    return int(float(found[1]) * _FACTORS[found[2].lower()])


def _content(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
        if len(content) > _LARGEST_FILE_BYTES:
            raise OSError(None, f"larger than {_LARGEST_FILE_BYTES} bytes")
        return dict(msgspec.toml.decode(content))
    except OSError as error:
        raise InvalidRequest.of(CONFIG, path, f"a file that can be read ({error.strerror})") from None
    except ImportError:
        raise InvalidRequest.of(CONFIG, path, "left out, or Python 3.11 or newer (or the package tomli)") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest.of(CONFIG, path, f"a TOML file ({error})") from None


def _unknown(field: str, name: str, kinds: Iterable[str]) -> InvalidRequest:
    """Without its value, which may be a token."""
    near = difflib.get_close_matches(name, list(kinds), 1, 0.6)
    rule = f"{near[0]} perhaps" if near else f"one of the settings {', '.join(sorted(kinds))}"
    return InvalidRequest.of(field, field, rule)


def _wrong(name: str, value: object, kind: Any) -> InvalidRequest:
    return InvalidRequest.of(name, value[:_SHOWN] if isinstance(value, str) else value, rule_of(kind))
