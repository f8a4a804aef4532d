"""Where a line is in a program's syntax tree, and what a block of statements does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from moediag.evidence.definitions import Function, last_name

CALLS = re.compile(
    r"(?:i?send|i?recv|barrier|broadcast|scatter|gather|wait_for_everyone|synchronize)\w*"
    r"|\w*(?:all|reduce)_(?:reduce|gather|to_all|scatter)\w*|reduce\w*"
)
_EXITS = frozenset(("exit", "_exit", "quit", "abort"))
_ANONYMOUS = (ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


def path_to(tree: ast.Module, line: int) -> list[ast.AST]:
    """The nodes around ``line``, from the module to the innermost statement, exception handler,
    case or lambda."""
    path: list[ast.AST] = [tree]
    while True:
        inside = [
            child
            for child in parts(path[-1])
            if getattr(child, "lineno", 0) <= line <= (getattr(child, "end_lineno", 0) or 0)
        ]
        if not inside:
            return path
        path.append(inside[-1])


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """Statements directly in ``node``, and handlers and cases, which hold statements."""
    for block in blocks(node):
        yield from block
    if isinstance(node, ast.Try):
        yield from node.handlers
    if isinstance(node, ast.Match):
        for case in node.cases:
            first, last = case.pattern.lineno, case.body[-1].end_lineno
            case.lineno, case.end_lineno = first, last  # type: ignore[attr-defined]
            yield case


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list):
            yield block


def is_called(scope: ast.AST, statement: ast.AST, function: str) -> bool:
    """Whether a frame of that name may run this scope. Lambdas and comprehensions have frames of
    their own, with names in angle brackets."""
    if function == "<module>":
        return isinstance(scope, ast.Module)
    if function.startswith("<"):
        return any(isinstance(node, _ANONYMOUS) for node in ast.walk(statement))
    return isinstance(scope, Function) and scope.name == function.rpartition(".")[2]


def communicates(block: Iterable[ast.stmt]) -> bool:
    """Whether a branch seems to contain a collective or point-to-point call. Two branches that both
    do may meet each other."""
    nodes = (node for statement in block for node in ast.walk(statement))
    return any(isinstance(n, ast.Call) and CALLS.fullmatch(last_name(n)) for n in nodes)


def calls_once(statement: ast.stmt) -> bool:
    """Whether a statement itself seems to make exactly one collective or point-to-point call."""
    repeated = (*_ANONYMOUS, ast.While, ast.For, ast.AsyncFor)
    if any(isinstance(node, repeated) for node in ast.walk(statement)):
        return False
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return sum(CALLS.fullmatch(last_name(call)) is not None for call in calls) == 1


def leaves_by(block: Sequence[ast.stmt]) -> str:
    """How a branch always leaves what encloses it: return, continue, break, raise, exit; "" if it
    does not."""
    last = block[-1] if block else None
    if isinstance(last, ast.Raise) and last.exc is not None and last_name(last.exc) == "SystemExit":
        return "exit"
    for kind, word in (
        (ast.Return, "return"), (ast.Continue, "continue"), (ast.Break, "break"),
        (ast.Raise, "raise"),
    ):  # fmt: skip
        if isinstance(last, kind):
            return word
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return "exit" if last_name(last.value.func) in _EXITS else ""
    return ""


def own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Expressions of a statement, without those of statements and functions inside it."""
    waiting: list[ast.AST] = [
        child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr)
    ]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr):
            yield node
        if not isinstance(node, ast.Lambda):
            waiting += ast.iter_child_nodes(node)
