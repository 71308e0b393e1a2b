"""Reads from a class what its fields may be: kinds and bounds are in the types, and nowhere else.

``Annotated[int, Meta(ge=1)]`` is a bound; ``least_above_zero`` one that 0 escapes. Classes are frozen dataclasses,
structs of msgspec and named tuples.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, SupportsIndex, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvgrpc.errors import Violation

Count = Annotated[int, Meta(ge=1)]
# What stands where this should be may hold a token: a refusal shows its type alone.
Secret = Meta(extra={"secret": True})


def bounded(*, least: float, most: float, unit: str) -> Meta:
    """Bounds of a number that has a unit, which refusals name."""
    return Meta(ge=least, le=most, extra={"unit": unit})


def seconds(most: float) -> Meta:
    """Seconds, more than none."""
    return Meta(gt=0, le=most, extra={"unit": "seconds"})


def least_above_zero(least: float, most: float | None = None, *, unit: str) -> Meta:
    """Bounds of a number that may also be 0, which means something else."""
    return Meta(ge=0, le=most, extra={"unit": unit, "least": least})


def violations(holder: object, path: str = "") -> Iterator[Violation]:
    """Each field of ``holder`` that is not what its class says, fields of fields included."""
    for name, kind in kinds_of(type(holder)).items():
        yield from _wrong(f"{path}{name}", getattr(holder, name), kind)


def kinds_of(kind: Any) -> dict[str, Any]:
    """The fields of a class, with their types as they are written."""
    return _kinds_of(kind)


def names_of(kind: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(each.name for each in dataclasses.fields(kind))
    found: tuple[str, ...] = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else kind._fields
    return found


def required_of(kind: type) -> tuple[str, ...]:
    """The fields that have no default."""
    if dataclasses.is_dataclass(kind):
        none = dataclasses.MISSING
        return tuple(each.name for each in dataclasses.fields(kind) if each.default is each.default_factory is none)
    return tuple(each.name for each in msgspec.structs.fields(kind) if each.required)


def has_fields(kind: Any) -> bool:
    """True if this is a class whose fields can be looked at."""
    return isinstance(kind, type) and (
        dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct) or hasattr(kind, "_fields")
    )


def bare(kind: Any) -> tuple[Any, Meta | None]:
    """A type without its bounds, and these."""
    if get_origin(kind) is Annotated:
        base, *notes = get_args(kind)
        return base, next((note for note in notes if isinstance(note, Meta)), None)
    return kind, None


def is_right(value: object, kind: Any) -> bool:
    """True if ``value`` is a ``kind`` within its bounds; fields of fields are not looked at."""
    base, meta = bare(kind)
    return _fits(value, base) and (meta is None or _within(value, meta))


def rule_of(kind: Any) -> str:
    """The rule that a value must keep, for people."""
    base, meta = bare(kind)
    if get_origin(base) in (Union, types.UnionType):
        return " or ".join("none" if each is type(None) else rule_of(each) for each in get_args(base))
    if get_origin(base) is Literal:
        return " or ".join(map(str, get_args(base)))
    if get_origin(base) in _LISTS:
        return f"a list of {rule_of(get_args(base)[0])}"
    if isinstance(base, type) and issubclass(base, enum.Enum):
        return " or ".join(text_of(member) for member in base)
    if isinstance(base, type) and has_fields(base):
        return f"a {base.__module__}.{base.__qualname__}, in text a table of {', '.join(names_of(base))}"
    word = _WORDS.get(base, "text" if base is str else "as the class says")
    return word if meta is None else _with_bounds(word, meta)


def text_of(member: enum.Enum) -> str:
    """The text of a member of an enumeration in settings."""
    return member.value if isinstance(member.value, str) else member.name.lower()


@functools.cache
def _kinds_of(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in names_of(kind)}


def _wrong(path: str, value: Any, kind: Any) -> Iterator[Violation]:
    base, meta = bare(kind)
    if get_origin(base) in _LISTS and _is_list(value):
        for index, item in enumerate(value):
            yield from _wrong(f"{path}[{index}]", item, get_args(base)[0])
    elif not is_right(value, kind):
        yield Violation(path, rule_of(kind), type(value) if meta is Secret else value)
    elif has_fields(base) and meta is not Secret:
        yield from violations(value, f"{path}.")


def _fits(value: Any, base: Any) -> bool:
    origin = get_origin(base)
    if origin in (Union, types.UnionType):
        return any(is_right(value, each) for each in get_args(base))
    if origin is Literal:
        return value in get_args(base)
    if origin in _LISTS:
        return _is_list(value) and all(is_right(item, get_args(base)[0]) for item in value)
    if base in (int, float):
        numbers = (SupportsIndex,) if base is int else (SupportsIndex, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    if not isinstance(base, type) or getattr(base, "_is_protocol", False):
        return True
    return isinstance(value, Mapping if base is dict else base)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _within(value: Any, meta: Meta) -> bool:
    if isinstance(value, str):
        return meta.pattern is None or re.search(meta.pattern, value) is not None
    least = (meta.extra or {}).get("least")
    return (
        (meta.ge is None or value >= meta.ge)
        and (meta.gt is None or value > meta.gt)
        and (meta.le is None or value <= meta.le)
        and (least is None or value == 0 or value >= least)
    )


def _with_bounds(word: str, meta: Meta) -> str:
    extra = meta.extra or {}
    if "unit" in extra:
        word = f"{word} of {extra['unit']}"
    if meta.pattern is not None:
        return f"{word} of the form {meta.pattern}"
    if "least" in extra:
        most = "" if meta.le is None else f" to {_plain(meta.le)}"
        return f"{word}, 0 or {'at least ' if not most else ''}{_plain(extra['least'])}{most}"
    if meta.ge is not None and meta.le is not None:
        return f"{word}, {_plain(meta.ge)} to {_plain(meta.le)}"
    bounds = [("above", meta.gt), ("at least", meta.ge), ("at most", meta.le)]
    return ", ".join([word, *(f"{how} {_plain(bound)}" for how, bound in bounds if bound is not None)])


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


_LISTS = (tuple, Sequence)
_WORDS: dict[Any, str] = {bool: "true or false", float: "a number", int: "a whole number", dict: "a table"}
