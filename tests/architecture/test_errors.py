"""What the contract promises of an error's metadata (error_reason.proto) is given wherever one is made."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvgrpc import errors
from kvgrpc.errors import KvGrpcError

SOURCE = Path(errors.__file__).parent
PROTO = SOURCE.parent / "protos" / "kvgrpc" / "v1" / "error_reason.proto"
CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, KvGrpcError) and value is not KvGrpcError
}
# Calls inside of metadata, and the keys that they give.
GIVEN_BY = {"_of": {"room", "attempt"}, "conflict_metadata": {"rank", "mismatchedFields"}}
# What is there for some.
ALSO = {"INVALID_REQUEST": {"room", "attempt"}, "WRONG_RANK": {"address"}}
# Reasons with one more key a field that does not fit.
OPEN = ("PARALLEL_LAYOUT_MISMATCH", "REGISTRATION_SHAPE_CONFLICT")


@cache
def promised() -> dict[str, frozenset[str]]:
    """Reason -> the keys that its comment names."""
    found, comment = {}, ""
    for line in PROTO.read_text().splitlines():
        text = line.strip()
        if text.startswith("//"):
            comment += " " + text.removeprefix("//").strip()
        elif value := re.match(r"ERROR_REASON_(\w+) = \d+;", text):
            named = re.search(r"Metadata: ([^.;]*)", comment)
            words = (
                []
                if named is None
                else [word.strip() for word in re.split(r",(?: and one key.*| which .*)?", named[1])]
            )
            found[value[1]] = frozenset(word.split()[0] for word in words if word)
            comment = ""
    return found


@cache
def made() -> tuple[tuple[str, str, ast.Call, ast.AST], ...]:
    """Where an exception of ours is made: place, class, the call, the function around it."""
    found: list[tuple[str, str, ast.Call, ast.AST]] = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if "errors import" in text:
            place = path.relative_to(SOURCE.parent)
            found += [(f"{place}:{node.lineno}", name, node, around) for around, node, name in calls(text)]
    return tuple(found)


def calls(text: str) -> Iterator[tuple[ast.AST, ast.Call, str]]:
    def look(node: ast.AST, around: ast.AST) -> Iterator[tuple[ast.AST, ast.Call, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id in CLASSES:
                yield around, child, child.func.id
            yield from look(child, child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else around)

    tree = ast.parse(text)
    yield from look(tree, tree)


def keys(call: ast.Call, around: ast.AST) -> set[str] | None:
    """None: they cannot be read off the source."""
    for keyword in call.keywords:
        if keyword.arg == "metadata":
            return keys_of(keyword.value, around)
    return set()


def keys_of(value: ast.expr, around: ast.AST) -> set[str] | None:
    if isinstance(value, ast.Name):
        assigned = [
            node.value
            for node in ast.walk(around)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == value.id
        ]
        return keys_of(assigned[0], around) if len(assigned) == 1 else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return GIVEN_BY.get(value.func.id)
    if not isinstance(value, ast.Dict):
        return None
    found: set[str] = set()
    for key, content in zip(value.keys, value.values, strict=True):
        if isinstance(key, ast.Constant):
            found.add(str(key.value))
        elif key is not None or (more := keys_of(content, around)) is None:
            return None
        else:
            found |= more
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_metadata_is_what_the_contract_names_wherever_an_error_is_made(name: str) -> None:
    reason = CLASSES[name].reason.name
    wanted = promised()[reason]
    wrong = []
    for where, made_class, call, around in made():
        found = keys(call, around) if made_class == name else None
        more = set() if found is None or reason in OPEN else found - wanted - ALSO.get(reason, set())
        if found is not None and (wanted - found or more):
            wrong.append(f"{where}: {sorted(found)} instead of {sorted(wanted)}")
    assert not wrong, "\n".join(wrong)


def test_every_exception_has_one_name() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(classes) == len(set(classes))
