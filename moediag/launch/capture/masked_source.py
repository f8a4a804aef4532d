"""Hides the secrets in a Python file so that it stays Python, with the same numbers of lines."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping

from moediag.masking import HIDDEN, is_plain, is_secret, masked

_LITERAL = re.compile(r"""\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'""")
# Functions whose first argument is a name, and a later one its value.
_BY_NAME = ("get", "getenv", "putenv", "setdefault", "add_argument", "pop")
_TAKES_SECRETS = re.compile(r"\w*(?:Auth|SecretStr|SecretBytes|Credentials?)|login")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_WITH_NAMES = (
    ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.keyword, ast.Dict, ast.arguments,
    ast.Compare, ast.Tuple, ast.Call,
)  # fmt: skip
_CONTAINERS = (ast.BinOp, ast.BoolOp, ast.Dict, ast.IfExp, ast.List, ast.Set, ast.Tuple)


def masked_source(text: str) -> str:
    """``text``, a Python file, without the secrets in its literals and comments."""
    text = _LITERAL.sub(lambda found: found[0][0] + masked(found[0][1:-1]) + found[0][0], text)
    try:
        tree = ast.parse(text)
        lines = [line.encode() for line in _without_comments(text).split("\n")]
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return masked(text)  # of a newer Python
    for first, column, last, end in sorted(set(_spans(tree)), reverse=True):
        before, after = lines[first - 1][:column], lines[last - 1][end:]
        kept = b"\n" * (last - first)  # within the literal: a statement may end with it
        kind = b"b" if lines[first - 1][column : column + 1] in b"bB" else b""
        quote = b'"""' if kept else b'"'
        lines[first - 1 : last] = (
            before + kind + quote + HIDDEN.encode() + kept + quote + after
        ).split(b"\n")
    return b"\n".join(lines).decode()


def _without_comments(text: str) -> str:
    """``text`` with masked comments."""
    lines = text.split("\n")
    if all(masked(found) == found for found in re.findall("#.*", text)):
        return text
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column] + masked(lines[row - 1][column:])
    return "\n".join(lines)


def _spans(tree: ast.Module) -> Iterator[tuple[int, int, int, int]]:
    """First line, column, last line and column of each literal to hide; none is in another."""
    nodes = list(ast.walk(tree))
    whole = [one for one in nodes if isinstance(one, ast.JoinedStr)]
    inside = {id(part) for one in whole for part in ast.walk(one) if part is not one}
    functions = {one.name: one for one in nodes if isinstance(one, _FUNCTIONS)}
    for node in nodes:
        given = _given(node, functions) if isinstance(node, ast.Call) else ()
        for one in (*_named(node), *_joined(node), *given):
            if id(one) not in inside:
                yield (one.lineno, one.col_offset, one.end_lineno or 0, one.end_col_offset or 0)


def _named(node: ast.AST) -> Iterator[ast.expr]:
    """The literals that have the name of a secret, by what ``node`` is."""
    for name, value in _pairs(node) if isinstance(node, _WITH_NAMES) else ():
        if is_secret(name):
            yield from _literals(name, value)
    if isinstance(node, ast.Call) and _TAKES_SECRETS.fullmatch(_name(node.func)):
        for value in (*node.args, *(word.value for word in node.keywords)):
            yield from _literals("secret", value)


def _given(
    call: ast.Call, functions: Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]
) -> Iterator[ast.expr]:
    """The literals that a call gives to parameters with the name of a secret."""
    function = functions.get(_name(call.func))
    if function is not None:
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        of_object = names[:1] in (["self"], ["cls"])
        for name, value in zip(names[of_object:], call.args, strict=False):
            if is_secret(name):
                yield from _literals(name, value)


def _pairs(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((_name(target), node.value) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value:
        yield _name(node.target), node.value
    elif isinstance(node, ast.keyword):
        yield node.arg or "", node.value
    elif isinstance(node, ast.Dict):
        yield from ((_name(key), value) for key, value in zip(node.keys, node.values, strict=True))
    elif isinstance(node, ast.arguments):
        names = [*node.posonlyargs, *node.args]
        yield from _defaults(names[len(names) - len(node.defaults) :], node.defaults)
        yield from _defaults(node.kwonlyargs, node.kw_defaults)
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        yield from ((_name(one), other) for one in sides for other in sides if one is not other)
    elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
        yield _name(node.elts[0]), node.elts[1]
    elif isinstance(node, ast.Call) and node.args and _name(node.func) in _BY_NAME:
        values = node.args[1:] + [word.value for word in node.keywords if word.arg == "default"]
        yield from ((_name(node.args[0]), value) for value in values)


def _defaults(
    names: Iterable[ast.arg], values: Iterable[ast.expr | None]
) -> Iterator[tuple[str, ast.expr]]:
    for name, value in zip(names, values, strict=True):
        if value is not None:
            yield name.arg, value


def _name(node: ast.expr | None) -> str:
    """``token`` of ``token``, ``self.token``, ``names["token"]`` and ``"token"``."""
    if isinstance(node, ast.Subscript):
        node = node.slice
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return getattr(node, "id", "") or getattr(node, "attr", "")


def _literals(name: str, value: ast.expr) -> Iterator[ast.expr]:
    """The literals that a value consists of; not the arguments of calls, but ``"X".strip()``."""
    if _is_text(value):
        if not (isinstance(value, ast.Constant) and is_plain(name, _text(value))):
            yield value
    elif isinstance(value, _CONTAINERS):
        for part in ast.iter_child_nodes(value):
            if isinstance(part, ast.expr):
                yield from _literals(name, part)
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        found = list(_literals(name, value.func.value))
        yield from found
        for argument in value.args if found or _is_text(value.func.value) else ():
            yield from _literals(name, argument)


def _joined(node: ast.AST) -> Iterator[ast.expr]:
    """The literals that are a secret together, adjacent, added, or words of a command."""
    if isinstance(node, ast.Constant) and _is_text(node):
        if HIDDEN not in _text(node) and masked(_text(node)) != _text(node):
            yield node
    elif isinstance(node, (ast.BinOp, ast.List, ast.Tuple)):
        parts = [one for one in ast.walk(node) if isinstance(one, ast.Constant) and _is_text(one)]
        parts.sort(key=lambda one: (one.lineno, one.col_offset))
        for between in ("", " ") if len(parts) > 1 else ():
            text = between.join(map(_text, parts))
            if (shown := masked(text)) != text:
                yield from (one for one in parts if _text(one) not in shown)


def _text(node: ast.Constant) -> str:
    return node.value.decode("latin-1") if isinstance(node.value, bytes) else str(node.value)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )
