"""The fields of result.json, read from the declarations of the result object."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType

from moediag.records import dataclass
from moediag.result import chart_data, diagnosis, run_result, table


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an object in result.json."""

    name: str
    type: str
    meaning: str
    """The text below its declaration; may be empty."""


@dataclass(frozen=True, slots=True)
class Record:
    """One kind of object in result.json."""

    name: str
    meaning: str
    fields: tuple[Field, ...]


def records() -> list[Record]:
    """All kinds of objects, the whole run first."""
    found = [r for module in (run_result, diagnosis, chart_data, table) for r in _records(module)]
    return sorted(found, key=lambda record: record.name != "RunResult")


def class_record(kind: type) -> Record:
    """The record of one class, from the source of its module."""
    module = inspect.getmodule(kind)
    assert module is not None
    return next(record for record in _records(module) if record.name == kind.__name__)


def _records(module: ModuleType) -> Iterator[Record]:
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            text = " ".join((ast.get_docstring(node) or "").split())
            yield Record(node.name, text, tuple(node_fields(node)))


def node_fields(node: ast.ClassDef) -> Iterator[Field]:
    """The annotated fields of a class."""
    following = [*node.body[1:], None]
    for statement, after in zip(node.body, following, strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield Field(statement.target.id, ast.unparse(statement.annotation), _text(after))


def _text(node: ast.stmt | None) -> str:
    """The string literal that documents the field before it."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""
