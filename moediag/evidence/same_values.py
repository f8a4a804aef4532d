"""Expressions that have the same value on all ranks: of constants, settings, the model's names and
the counters of loops over these."""

from __future__ import annotations

import ast
import re

from moediag.evidence.definitions import Where, last_name

# Objects whose attributes are settings, which all ranks read alike.
_SETTINGS = re.compile(
    r"(?:\w+_)?(?:args?|cfg|conf|config|configs|opts?|options|hparams|hps|flags|settings)",
    re.IGNORECASE,
)
_PLAIN = frozenset(
    ("range", "len", "enumerate", "zip", "list", "tuple", "reversed", "int", "max", "min", "trange")
)
_MODEL = frozenset(
    ("parameters", "named_parameters", "modules", "named_modules", "children", "named_children",
     "buffers", "state_dict")
)  # fmt: skip
# Without arguments: of the whole job. Groups may have different sizes.
_OF_JOB = frozenset(("get_world_size", "world_size", "is_available", "is_initialized"))
_ENVIRONMENT = frozenset(("os.environ.get", "os.getenv", "environ.get", "getenv"))
# Environment variables that processes or nodes have of their own.
_OF_PROCESS = re.compile(r"RANK|NODE|HOST|LOCAL|PROC|DEVICE|ID\b|PID|TMP")
_DEPTH = 4  # definitions followed from a name
_PARTS = (
    ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.operator, ast.boolop,
    ast.unaryop, ast.cmpop,
)  # fmt: skip


def same(node: ast.AST, at: Where, depth: int = 0) -> bool:
    """Whether an expression, or the length of a sequence, is certainly the same on all ranks that
    are in the same turn of the loops around it."""
    if isinstance(node, _PARTS):
        return all(same(part, at, depth) for part in ast.iter_child_nodes(node))
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return not any(isinstance(one, ast.Starred) for one in node.elts)
    if isinstance(node, ast.Attribute):
        setting = _SETTINGS.fullmatch(last_name(node.value)) is not None
        return setting or _defined_same(node, at, depth)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
        known = isinstance(node.slice, ast.Constant)
        return known and _OF_PROCESS.search(ast.unparse(node.slice)) is None
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        if ast.unparse(node.func) in _ENVIRONMENT and node.args:
            return _OF_PROCESS.search(ast.unparse(node.args[0])) is None
        if name in _MODEL or (name in _OF_JOB and not node.args and not node.keywords):
            return True
        return name in _PLAIN and all(same(one, at, depth) for one in node.args)
    if isinstance(node, ast.Name) and (loops := _loops_of(node, at)):
        return all(_counter(loop, node, at) or _of_equals(loop.iter, at, depth) for loop in loops)
    return isinstance(node, ast.Name) and _defined_same(node, at, depth)


def _defined_same(node: ast.expr, at: Where, depth: int) -> bool:
    made = at.stands_for(node) if depth < _DEPTH else []
    if len(made) != 1 or not same(made[0].value, made[0].at, depth + 1):
        return False
    whole = isinstance(made[0].value, ast.List | ast.Set | ast.Call | ast.BinOp)
    return not (whole and _is_changed(last_name(node), made[0].at))


def _is_changed(name: str, at: Where) -> bool:
    """Whether a method of the object, such as ``append``, is called in its file."""
    return any(
        isinstance(n, ast.Attribute)
        and isinstance(n.value, ast.expr)
        and last_name(n.value) == name
        for n in ast.walk(at.file.tree)
    )


def _loops_of(name: ast.Name, at: Where) -> list[ast.For]:
    """The loops whose variable it is."""
    return [
        loop
        for loop in ast.walk(at.scope)
        if isinstance(loop, ast.For)
        and any(isinstance(n, ast.Name) and n.id == name.id for n in ast.walk(loop.target))
    ]


def _of_equals(items: ast.expr, at: Where, depth: int) -> bool:
    """Whether each element is the same on all ranks: of the model's names or of written values."""
    if isinstance(items, ast.Call):
        return last_name(items.func) in _MODEL
    named = isinstance(items, ast.Name) and not _loops_of(items, at)
    made = at.stands_for(items) if named and depth < _DEPTH else []
    items, at = (made[0].value, made[0].at) if len(made) == 1 else (items, at)
    written = isinstance(items, ast.List | ast.Tuple)
    return written and all(same(one, at, depth + 1) for one in items.elts)


def _counter(loop: ast.For, name: ast.Name, at: Where) -> bool:
    called = last_name(loop.iter) if isinstance(loop.iter, ast.Call) else ""
    if called in ("range", "trange", "count"):
        return same(loop.iter, at) or called == "count"
    first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else None
    return called == "enumerate" and isinstance(first, ast.Name) and first.id == name.id
