"""The faults: a comparison off by one, a call or an assignment left out, a condition turned round."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
SUMS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv}
# What people read, and what no behaviour hangs on.
LEFT_ALONE = ("__repr__", "__str__", "__slots__", "__all__")


@dataclass(frozen=True)
class Mutant:
    """One fault: the ``number``-th place of the module that can be changed."""

    path: Path
    number: int
    line: int
    what: str

    def tree(self) -> ast.Module:
        """The whole module with the fault."""
        changed = ast.parse(self.path.read_text())
        node, what = list(_sites(changed))[self.number]
        _change(node, changed, what)
        return ast.fix_missing_locations(changed)


def mutants_of(path: Path) -> Iterator[Mutant]:
    for number, (node, what) in enumerate(_sites(ast.parse(path.read_text()))):
        yield Mutant(path, number, node.lineno, f"{what}: {ast.unparse(node)[:90]}")


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
