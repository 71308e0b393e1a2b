"""What docs/errors.md promises of an exception's metadata is given wherever one is made."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc import errors

SOURCE = Path(errors.__file__).parent
# Adapters and the transfer engine make theirs in functions of their own.
ELSEWHERE = ("engines", "transfer")
PROMISED = {
    "InvalidRequest": {"field", "value", "rule"},
    "FeatureDisabled": {"feature", "howToEnable"},
    "PeerUnreachable": {"address"},
    "AddressNotAllowed": {"address", "configKey"},
}


def made(name: str) -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(SOURCE).parts[0] in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                yield f"{path.relative_to(SOURCE.parent)}:{node.lineno}", node


def keys(call: ast.Call) -> set[str]:
    for keyword in call.keywords:
        if keyword.arg == "metadata" and isinstance(keyword.value, ast.Dict):
            return {str(key.value) for key in keyword.value.keys if isinstance(key, ast.Constant)}
    return set()


@pytest.mark.parametrize("name", PROMISED)
def test_metadata_is_complete_where_an_error_is_made(name: str) -> None:
    found = list(made(name))
    assert found or name == "InvalidRequest"
    missing = [
        f"{where}: {sorted(PROMISED[name] - keys(call))}" for where, call in found if PROMISED[name] - keys(call)
    ]
    assert not missing


def test_every_exception_has_one_name() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(classes) == len(set(classes))
