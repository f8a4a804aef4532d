"""What programs and fixes say of themselves. Their files are parsed and never imported, because
they import torch."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moediag.errors import ScenarioError
from moediag.lab import content
from moediag.lab.content import FIXES, PROGRAMS
from moediag.lab.scenario.source import nearest
from moediag.records import dataclass

if TYPE_CHECKING:
    from moediag.lab.scenario.schema import Variant

_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True, slots=True)
class Fix:
    name: str
    """As a scenario names it."""
    summary: str
    """What it does, in one sentence."""
    source: str
    """Who proposed it."""


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    """As a scenario names it."""
    options: Mapping[str, Any]
    """Option -> default; a tuple lists the values of a text option, its default first."""

    def filled(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns every option with its value. ``given`` was checked, see :meth:`mistake`."""
        return {k: v[0] if isinstance(v, tuple) else v for k, v in self.options.items()} | {**given}

    def mistake(self, option: str, value: Any) -> str:
        """Returns what is wrong with the value of a known option; "" if nothing is."""
        may = self.options[option]
        if isinstance(may, tuple):
            return "" if value in may else f"must be one of {', '.join(may)}, not {value!r}"
        fits = type(value) is type(may) or (isinstance(may, float) and type(value) is int)
        return "" if fits else f"must be {_TYPES[type(may)]}, not {value!r}"


def fix(name: str) -> Fix:
    """Returns the shipped fix ``name``, or the user's own in the file of that path. Raises
    ScenarioError if there is none, or if a rank could not use it."""
    found = _module(FIXES, name)
    found.need("before_wrap(model, anatomy, wrapper)", "after_wrap(model, anatomy, wrapper)")
    return Fix(name, str(found.constant("SUMMARY", "")), str(found.constant("SOURCE", "")))


def program(name: str) -> Program:
    """Returns a program, as :func:`fix` a fix."""
    found = _module(PROGRAMS, name)
    found.need("run(collector)")
    options = found.constant("OPTIONS", {})
    if not isinstance(options, dict) or not all(map(_is_option, options.items())):
        raise ScenarioError(
            f"{found.file}: OPTIONS must map the name of each option to its default (True, 3, 0.5, "
            '"text") or to a tuple of texts, its default first'
        )
    return Program(name, options)


@cache
def names(kind: str) -> tuple[str, ...]:
    """Returns the names of the shipped programs or fixes. Modules beside them without the constant
    are helpers."""
    constant = {PROGRAMS: "\nOPTIONS", FIXES: "\nSUMMARY"}[kind]
    files = sorted((content.folder() / kind).glob("*.py"))
    found = (f.stem.replace("_", "-") for f in files if constant in f.read_text(encoding="utf-8"))
    return tuple(found)


def described(variant: Variant) -> tuple[str, str]:
    """Returns what the fix of ``variant`` does and who proposed it; "" where that is not said. A
    source in the scenario takes precedence over that of the fix module."""
    told = fix(variant.fix) if variant.fix else Fix("", "", "")
    return told.summary or variant.title, variant.source or told.source


def make_absolute(data: Mapping[str, Any], folder: Path) -> None:
    """Makes the paths of a user's own programs and fixes absolute. ``data``: a scenario that is not
    validated; ``folder``: what its paths are relative to."""
    variants, cost = data.get("variants"), data.get("cost")
    for section in (data, *(variants.values() if isinstance(variants, dict) else ())):
        if isinstance(section, dict):
            _absolute(section, "fix", folder)
            _absolute(section.get("program"), "name", folder)
    if isinstance(cost, dict) and isinstance(cost.get("fixes"), list):
        for index in range(len(cost["fixes"])):
            _absolute(cost["fixes"], index, folder)


def _absolute(values: Any, key: Any, folder: Path) -> None:
    value = values.get(key) if isinstance(values, dict) else values[key] if values else None
    if isinstance(value, str) and content.is_own(value):
        values[key] = os.path.abspath(folder / value)  # noqa: PTH100 - resolve() follows links


def _is_option(item: tuple[Any, Any]) -> bool:
    name, default = item
    if isinstance(default, tuple):
        return isinstance(name, str) and bool(default) and all(type(v) is str for v in default)
    return isinstance(name, str) and type(default) in _TYPES


@dataclass(frozen=True, slots=True)
class _Module:
    """The top level of a file."""

    file: Path
    kind: str
    body: Sequence[ast.stmt]

    def constant(self, name: str, default: Any) -> Any:
        """Returns the value assigned to ``name``. Raises ScenarioError if it is computed."""
        for node in self.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in _assigned(node):
                try:
                    return ast.literal_eval(node.value) if node.value else default
                except ValueError:
                    raise ScenarioError(
                        f"{self.file}:{node.lineno}: {name} is computed; write plain values"
                    ) from None
        return default

    def need(self, *functions: str) -> None:
        """Raises ScenarioError unless the file defines or imports one of ``functions``, each as
        ``name(parameters)``."""
        bound: set[str] = set()
        for node in self.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                bound.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                bound |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                bound |= _assigned(node)
        if not bound & {text.partition("(")[0] for text in functions}:
            one = {PROGRAMS: "program", FIXES: "fix"}[self.kind]
            raise ScenarioError(f"{self.file}: not a {one}: define {' or '.join(functions)}")


def _assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _module(kind: str, name: str) -> _Module:
    """Raises ScenarioError."""
    if content.is_own(name):
        return _parsed(kind, name)
    if name not in names(kind):
        one = {PROGRAMS: "program", FIXES: "fix"}[kind]
        path = "; the path of your own ends in .py" if "/" in name else nearest(name, names(kind))
        raise ScenarioError(f'no {one} is called "{name}"{path}')
    return _shipped(kind, name)


def _parsed(kind: str, name: str) -> _Module:
    file = content.file(kind, name)
    try:
        return _Module(file, kind, ast.parse(file.read_bytes()).body)
    except OSError as error:
        raise ScenarioError(f"{file}: {error.strerror or error}") from None
    except SyntaxError as error:
        raise ScenarioError(f"{file}:{error.lineno or 1}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a zero byte
        raise ScenarioError(f"{file}: not a Python file: {error}") from None


_shipped = cache(_parsed)
