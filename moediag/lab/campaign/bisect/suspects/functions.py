"""Finds the functions that differ between two states of a Python file. Pure.

Only executable code is compared: comments, layout, docstrings and the position in the file are
ignored. A nested function is part of the one around it. A class that exists on one side only is one
change, not one per method.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moediag.result.verdicts import StrEnum

CONTEXT = 2  # lines around a difference
TOP = "<module>"  # the statements of a file outside functions and classes
_Named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class How(StrEnum):
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True)
class Piece:
    """A function, or a class's own statements."""

    name: str  # qualified, e.g. ``Qwen3MoeExperts.forward``
    first: int  # first line, from 1, decorators included
    last: int  # last line
    raw: str  # the lines of a function, "" for anything else
    # makes the normalised source
    write: Callable[[], tuple[str, ...]] = field(repr=False, compare=False)
    # makes the normalised source of a class with its contents
    whole: Callable[[], tuple[str, ...]] = field(repr=False, compare=False)
    is_class: bool = False

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """Returns normalised source, made on request because it is expensive."""
        return self.write()

    def entire(self) -> Piece:
        return dataclasses.replace(self, write=self.whole) if self.is_class else self

    def same(self, other: Piece) -> bool:
        return bool(self.raw and self.raw == other.raw) or self.lines == other.lines


@dataclass(frozen=True)
class ChangedFunction:
    """``old``, ``new``: None on the side that lacks it."""

    file: str
    name: str
    how: How
    old: Piece | None
    new: Piece | None

    @functools.cached_property
    def diff(self) -> tuple[str, ...]:
        """Returns the unified diff of normalised source, without its head."""
        old, new = (side.lines if side else () for side in (self.old, self.new))
        found = list(difflib.unified_diff(old, new, n=CONTEXT, lineterm=""))[2:]
        return tuple("..." if line.startswith("@@") else line for line in found)[1:]

    @property
    def size(self) -> int:
        """Returns the number of lines that only one side has."""
        return sum(line[:1] in ("+", "-") for line in self.diff)


def pieces(source: str) -> dict[str, Piece]:
    """Returns every function and class of ``source`` by name, and :data:`TOP`. Joins those with one
    name (one per platform, overloads). Raises SyntaxError or ValueError for what this Python cannot
    parse."""
    found: dict[str, Piece] = {}
    rows = source.splitlines()
    try:
        tree = ast.parse(source)
        for piece in _walk(tree.body, "", rows):
            before = found.get(piece.name)
            found[piece.name] = _joined(before, piece) if before else piece
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    own = functools.partial(_own, tree.body)
    found[TOP] = Piece(TOP, 1, max(1, len(rows)), "", own, own)
    return found


def _joined(before: Piece, piece: Piece) -> Piece:
    return dataclasses.replace(
        piece,
        raw=before.raw + piece.raw,
        write=lambda: (*before.lines, *piece.lines),
        whole=lambda: (*before.whole(), *piece.whole()),
    )


def changed(file: str, old: str | None, new: str | None) -> list[ChangedFunction]:
    """Returns the changes, in the order of the newer file. ``old`` and ``new``: its text, None if
    the file is missing. Raises as :func:`pieces`."""
    before = pieces(old) if old is not None else {}
    after = pieces(new) if new is not None else {}
    found = []
    for name in dict.fromkeys([*after, *before]):
        a, b = before.get(name), after.get(name)
        if a is not None and b is not None:
            if not a.same(b):
                found.append(ChangedFunction(file, name, How.CHANGED, a, b))
        elif a is not None and not _with_its_class(name, before, after):
            found.append(ChangedFunction(file, name, How.REMOVED, a.entire(), None))
        elif b is not None and not _with_its_class(name, after, before):
            found.append(ChangedFunction(file, name, How.ADDED, None, b.entire()))
    return found


def _with_its_class(name: str, there: Mapping[str, Piece], here: Mapping[str, Piece]) -> bool:
    """Whether some class around ``name`` is also missing ``here``."""
    parts = name.split(".")
    around = (".".join(parts[:n]) for n in range(1, len(parts)))
    return any(outer in there and outer not in here for outer in around)


# ------------------------------------------------------------------------ reading a file


def _walk(body: list[ast.stmt], prefix: str, rows: Sequence[str]) -> Iterator[Piece]:
    for node in body:
        if isinstance(node, _Named):
            name = prefix + node.name
            # As in co_firstlineno: the first decorator's.
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            last = node.end_lineno or first
            whole = functools.partial(_entire, node)
            if isinstance(node, ast.ClassDef):
                own = functools.partial(_written, node)
                yield Piece(name, first, last, "", own, whole, is_class=True)
                yield from _walk(node.body, f"{name}.", rows)
            else:
                yield Piece(name, first, last, "\n".join(rows[first - 1 : last]), whole, whole)
        else:
            for inner in _blocks(node):
                yield from _walk(inner, prefix, rows)


def _written(node: ast.ClassDef) -> tuple[str, ...]:
    return (*_plain(_headed(node)), *_own(node.body))


def _entire(node: ast.stmt) -> tuple[str, ...]:
    return _plain(_NoDocstrings().visit(node))


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yields the statements inside an ``if``, ``try``, ``with`` or loop."""
    for part in ("body", "orelse", "finalbody"):
        yield getattr(node, part, [])
    for handler in getattr(node, "handlers", []):
        yield handler.body


def _own(body: list[ast.stmt]) -> tuple[str, ...]:
    """Returns the statements of a class or file, without functions, classes and the docstring."""
    lines: list[str] = []
    for node in _without_docstring(body):
        if isinstance(node, _Named):
            continue
        nested = [x for block in _blocks(node) for x in block]
        if any(isinstance(x, _Named) for x in nested):
            lines += [line for block in _blocks(node) for line in _own(block)]
        else:
            lines += _plain(node)
    return tuple(lines)


def _headed(node: ast.ClassDef) -> ast.stmt:
    """Returns ``class NAME(BASES): ...`` with its decorators."""
    head = ast.ClassDef(
        name=node.name,
        bases=node.bases,
        keywords=node.keywords,
        body=[ast.Expr(ast.Constant(...))],
        decorator_list=node.decorator_list,
    )
    head.type_params = getattr(node, "type_params", [])  # type: ignore[attr-defined,unused-ignore]
    return ast.fix_missing_locations(head)


class _NoDocstrings(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, _Named):
            node.body = _without_docstring(node.body) or [ast.Pass()]
        return node


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return body[1:] if isinstance(first.value.value, str) else body
    return body


def _plain(node: ast.AST) -> tuple[str, ...]:
    return tuple(line for line in ast.unparse(node).splitlines() if line)
