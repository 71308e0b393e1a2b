"""The faults: a comparison off by one, a call or an assignment left out, a condition turned round."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
SUMS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv}
# What people read, and what no behaviour hangs on.
LEFT_ALONE = ("__repr__", "__str__", "__slots__", "__all__")


@dataclass(frozen=True)
class Mutant:
    """One fault: the ``number``-th place of the module that can be changed. ``what`` says so for people, without the
    line: function, kind, place."""

    path: Path
    number: int
    line: int
    kind: str
    what: str

    def tree(self) -> ast.Module:
        """The whole module with the fault."""
        return self.applied(*site(self))

    def applied(self, tree: ast.Module, node: ast.stmt | ast.expr) -> ast.Module:
        _change(node, tree, self.kind)
        return ast.fix_missing_locations(tree)


def site(mutant: Mutant) -> tuple[ast.Module, ast.stmt | ast.expr]:
    """The module as it is, and where in it the fault goes."""
    tree = ast.parse(mutant.path.read_text())
    return tree, list(_sites(tree))[mutant.number][0]


def mutants_of(path: Path) -> Iterator[Mutant]:
    tree = ast.parse(path.read_text())
    places = dict(_places(tree, "", ""))
    seen: Counter[str] = Counter()
    for number, (node, kind) in enumerate(_sites(tree)):
        function, statement = places[node]
        text = ast.unparse(node).splitlines()[0][:90]
        what = f"{function}: {kind}: {text}" + (f" in {statement}" if statement != text else "")
        seen[what] += 1
        yield Mutant(path, number, node.lineno, kind, what + (f" ({seen[what]})" if seen[what] > 1 else ""))


def _places(tree: ast.AST, function: str, statement: str) -> Iterator[tuple[ast.AST, tuple[str, str]]]:
    """Function and statement of each node."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inside = f"{function}.{child.name}".lstrip("."), statement
        elif isinstance(child, ast.stmt):
            inside = function, ast.unparse(child).splitlines()[0][:90]
        else:
            inside = function, statement
        yield child, inside
        yield from _places(child, *inside)


def _sites(tree: ast.AST, function: bool = False) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Everything below the node that can be changed, in a fixed order."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name in LEFT_ALONE:
                continue
            if isinstance(child, ast.expr | ast.stmt) and function:
                yield from ((child, what) for what in _faults(child))
            if isinstance(child, ast.AnnAssign) and not function and _is_a_beginning(child.value):
                yield child.value, "constant"
            if isinstance(child, ast.AST):
                yield from _sites(child, function or isinstance(child, ast.FunctionDef))


def _faults(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield "comparison"
    elif isinstance(node, ast.BoolOp):
        yield "and/or"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "no not"
    elif isinstance(node, ast.BinOp) and type(node.op) in SUMS:
        yield "arithmetic"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield "constant"
    elif _is_a_call(node) or (isinstance(node, ast.Assign | ast.AugAssign) and not _binds_names(node)):
        yield "left out"
    elif isinstance(node, ast.If | ast.IfExp) and isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        yield "turned round"


def _is_a_beginning(value: ast.expr | None) -> TypeGuard[ast.Constant]:
    """With what a field of a record begins: nothing yet. Other defaults are settings."""
    return isinstance(value, ast.Constant) and type(value.value) in (int, bool) and value.value in (0, 1)


def _is_a_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _binds_names(node: ast.Assign | ast.AugAssign) -> bool:
    """A name that is never bound is a fault that no one could miss."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return isinstance(node, ast.Assign) and isinstance(target, ast.Name | ast.Tuple)


def _change(node: ast.stmt | ast.expr, tree: ast.Module, what: str) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.UnaryOp):
        _replace(tree, node, node.operand)
    elif isinstance(node, ast.BinOp):
        node.op = SUMS[type(node.op)]()
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    elif isinstance(node, ast.If | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    else:
        assert what == "left out"
        _replace(tree, node, ast.Pass())


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, ast.copy_location(new, old))
            elif isinstance(value, list):
                value[:] = [ast.copy_location(new, old) if each is old else each for each in value]
