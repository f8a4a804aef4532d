"""Tells, when the rank is examined, what the conditions before its present line were: each ``if``
that a user's function on the main thread's stack has passed, as far as its names still have the
values that it tested.

Nothing of the program is called. Only names, attributes that are plain values, constants and
comparisons of numbers, booleans, strings and None are read.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
import operator
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from moediag.masking import HIDDEN, is_secret, masked
from moediag.recorder.core import Recorder

_MOST_FRAMES = 6
_MOST_TESTS = 40
_MOST_LINES = 10_000  # of a file
_LONGEST = 40  # characters of a value
_NUMBERS = (bool, int, float)
_PLAIN = (*_NUMBERS, str, type(None))
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPARE: Dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_COMPUTE: Dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip

Tests = List[Dict[str, Any]]


class _UnknownError(Exception):
    """A value cannot be read without running the program."""


def install(recorder: Recorder) -> None:
    user, started = recorder.user_lines, time.time()

    def tell() -> None:
        frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
        found: Tests = []
        frames = 0
        while frame is not None and frames < _MOST_FRAMES:
            if user.is_user(frame.f_code.co_filename):
                frames += 1
                # Not of a file that has changed or is gone, or that only a newer Python can read.
                with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
                    if os.stat(frame.f_code.co_filename).st_mtime < started:  # noqa: PTH116
                        found += passed(frame)
            frame = frame.f_back
        if found:
            # Without a beat: the rank itself made no progress.
            recorder.log.event("conditions", tests=found[:_MOST_TESTS])

    recorder.on_capture.append(tell)


def passed(frame: Any) -> Tests:
    """The conditions that the function of ``frame`` has passed, with the values of their names."""
    lines = linecache.getlines(frame.f_code.co_filename)
    if not 0 < len(lines) < _MOST_LINES:
        return []
    tree = ast.parse("".join(lines))
    scope = _scope(tree, frame.f_code)
    if scope is None:
        return []
    reader = _Reader(frame, _elsewhere(tree, scope), list(_stores(scope)))
    reader.block(scope.body)
    name = Path(frame.f_code.co_filename).name
    return [{"file": name, **test} for test in reader.found]


class _Reader:
    """Reads one function up to its present line."""

    def __init__(self, frame: Any, elsewhere: Set[str], stores: List[Tuple[str, int]]) -> None:
        self.found: Tests = []
        self._frame = frame
        self._here = frame.f_lineno
        self._elsewhere = elsewhere
        self._stores = stores

    def block(self, body: Sequence[ast.stmt]) -> None:
        """Reads the statements that ran before the present line, or hold it."""
        for one in body:
            if one.lineno > self._here:
                return
            if isinstance(one, ast.If):
                self._branch(one)
            elif isinstance(one, (ast.With, ast.AsyncWith, ast.Try)) or (
                isinstance(one, _LOOPS) and _in(one.body, self._here)
            ):  # a loop that ended may have tested other values in each turn
                self.block(one.body)

    def _branch(self, one: ast.If) -> None:
        inside = self._here <= (one.test.end_lineno or one.lineno)  # it is being decided
        holds = None if inside else self._test(one)
        for branch, side in ((one.body, True), (one.orelse, False)):
            if _in(branch, self._here) or holds is side:
                self.block(branch)

    def _test(self, one: ast.If) -> Optional[bool]:
        values: Dict[str, Any] = {}
        try:
            holds = bool(self._value(one.test, values))
        except (_UnknownError, ArithmeticError, TypeError, ValueError):
            return None
        for text in values:
            if self._elsewhere & {text, text.rpartition(".")[2]}:
                return None
            for stored, line in self._stores:
                if one.lineno < line <= self._here and f"{text}.".startswith(f"{stored}."):
                    return None
        told = {text: _shown(text, value) for text, value in values.items()}
        self.found.append({"line": one.lineno, "holds": holds, "values": told})
        return holds

    # ------------------------------------------------------------------ expressions

    def _value(self, node: ast.expr, values: Dict[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return _plain(node.value)
        if isinstance(node, (ast.Name, ast.Attribute)):
            found = _plain(self._object(node))
            values[_text(node)] = found
            return found
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self._value(node.operand, values)
        if isinstance(node, ast.BoolOp):
            return self._several(node, values)
        if isinstance(node, ast.BinOp) and type(node.op) in _COMPUTE:
            pair = [self._value(side, values) for side in (node.left, node.right)]
            if all(type(one) in _NUMBERS for one in pair):
                return _COMPUTE[type(node.op)](*pair)
        if isinstance(node, ast.Compare) and all(type(op) in _COMPARE for op in node.ops):
            return self._compared(node, values)
        raise _UnknownError

    def _several(self, node: ast.BoolOp, values: Dict[str, Any]) -> bool:
        """The value of ``and`` or ``or``, also where one known part decides it."""
        decisive = isinstance(node.op, ast.Or)
        unknown = False
        found = []
        for part in node.values:
            try:
                found.append(bool(self._value(part, values)))
            except _UnknownError:
                unknown = True
        if decisive in found:
            return decisive
        if unknown:
            raise _UnknownError
        return not decisive

    def _compared(self, node: ast.Compare, values: Dict[str, Any]) -> bool:
        same = all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
        before, right = self._side(node.left, same, values), True
        for op, side in zip(node.ops, node.comparators):  # noqa: B905
            after = self._side(side, same, values)
            right = right and _COMPARE[type(op)](before, after)
            before = after
        return right

    def _side(self, node: ast.expr, same: bool, values: Dict[str, Any]) -> Any:
        """One side of a comparison; of ``is`` any object."""
        if not same or not isinstance(node, (ast.Name, ast.Attribute)):
            return self._value(node, values)
        found = self._object(node)
        values[_text(node)] = found if type(found) in _PLAIN else type(found)
        return found

    def _object(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            for names in (self._frame.f_locals, self._frame.f_globals, vars(builtins)):
                if node.id in names:
                    return names[node.id]
        if isinstance(node, ast.Attribute):
            own = _own(self._object(node.value))
            if node.attr in own:
                return own[node.attr]
        raise _UnknownError


def _own(value: Any) -> Dict[str, Any]:
    """The attributes that are the object's own: no property is called."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _plain(value: Any) -> Any:
    if type(value) not in _PLAIN:
        raise _UnknownError
    return value


def _shown(text: str, value: Any) -> str:
    """The value of the name ``text``, without secrets."""
    secret = isinstance(value, str) and is_secret(text)
    return HIDDEN if secret and value else masked(repr(value))[:_LONGEST]


def _text(node: ast.expr) -> str:
    """``args.rank``."""
    if isinstance(node, ast.Attribute):
        return f"{_text(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


# ---------------------------------------------------------------------- the function


def _scope(tree: ast.Module, code: Any) -> Any:
    if code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _in(body: Sequence[ast.stmt], line: int) -> bool:
    return bool(body) and body[0].lineno <= line <= (body[-1].end_lineno or 0)


def _stores(scope: ast.AST) -> Iterator[Tuple[str, int]]:
    """What a function assigns, and where; without functions inside it."""
    for node in ast.iter_child_nodes(scope):
        context = getattr(node, "ctx", None)
        if isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(context, ast.Load):
            yield _text(node), node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno
        if not isinstance(node, _FUNCTIONS):
            yield from _stores(node)


def _elsewhere(tree: ast.Module, scope: ast.AST) -> Set[str]:
    """Names that other functions of the file may change: global ones, and attributes that are
    assigned outside ``__init__`` and ``scope``."""
    found: Set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            found.update(node.names)
        other = isinstance(node, _FUNCTIONS) and node is not scope
        if other and getattr(node, "name", "") != "__init__":
            found.update(text.rpartition(".")[2] for text, _ in _stores(node) if "." in text)
    return found
