"""Copies the definitions that a program needs out of moediag's own modules into one flat file.

Starts from some names and follows what their source mentions. Sources are read as text, never
imported.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import moediag
from moediag.errors import UsageError

ROOT = Path(moediag.__file__).parent
_Place = tuple[str, str]  # module, name in it


@dataclass(slots=True)
class _Module:
    """The top level of one module."""

    name: str
    text: str
    made: dict[str, ast.stmt] = field(default_factory=dict)
    """Name -> the statement that defines it."""
    own: dict[str, _Place] = field(default_factory=dict)
    """Name -> where moediag defines what is imported under it; a module has the name ""."""
    foreign: dict[str, str] = field(default_factory=dict)
    """Name -> the statement that imports it from elsewhere."""


def flat(wanted: Sequence[_Place], replaced: Mapping[_Place, str]) -> str:
    """Returns imports and definitions of ``wanted`` and of all that they need, those used at import
    first. ``replaced``: source to use instead. Raises UsageError if two modules define one name
    differently, or if a function imports from moediag."""
    modules: dict[str, _Module] = {}
    needed: dict[_Place, str] = {}
    imports: dict[str, str] = {}
    left = list(wanted)
    while left:
        place = left.pop()
        if place in needed:
            continue
        module = modules.setdefault(place[0], _read(place[0]))
        node = module.made.get(place[1])
        if node is None:
            raise UsageError(f"{place[0]} has no definition of {place[1]}")
        if place in replaced:
            (node,) = ast.parse(replaced[place]).body
            needed[place] = replaced[place].strip("\n")
        else:
            needed[place] = _source(module, node)
        for child in ast.walk(node):
            if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("moediag"):
                raise UsageError(f"{'.'.join(place)} imports {child.module} inside")
            if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name):
                target, name = module.own.get(child.value.id, ("", "no module"))
                if name == "":
                    left.append((target, child.attr))
            if isinstance(child, ast.Name):
                if child.id in module.made:
                    left.append((module.name, child.id))
                elif module.own.get(child.id, ("", ""))[1]:
                    left.append(module.own[child.id])
                elif child.id in module.foreign:
                    imports[child.id] = module.foreign[child.id]
    names = [name for _, name in needed]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise UsageError(f"two modules define {', '.join(double)}")
    ordered = [place for name in _order(modules) for place in _in(modules[name], needed)]
    return (
        "\n".join(_grouped(imports.values()))
        + "\n\n\n"
        + "\n\n\n".join(needed[place] for place in ordered)
    )


def _grouped(imports: Iterable[str]) -> Iterator[str]:
    """Yields the statements, one for each module."""
    names: dict[str, list[str]] = {}
    for line in sorted(set(imports)):
        module, _, name = line.partition(" import ")
        names.setdefault(module, []).append(name)
    yield from (module for module, (name, *_) in names.items() if not name)
    yield from (f"{m} import {', '.join(of)}" for m, of in names.items() if of[0])


@functools.cache
def _read(name: str) -> _Module:
    text = _path(name).read_text(encoding="utf-8")
    module = _Module(name, text)
    for node in ast.parse(text).body:
        module.made.update(dict.fromkeys(_names(node), node))
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                module.foreign[bound] = ast.unparse(ast.Import([alias]))
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            for alias in node.names:
                bound = alias.asname or alias.name
                if (node.module or "").startswith("moediag"):
                    module.own[bound] = _defined(str(node.module), alias.name)
                else:
                    one = ast.ImportFrom(node.module, [alias], node.level)
                    module.foreign[bound] = ast.unparse(one)
    return module


def _path(name: str) -> Path:
    path = ROOT.joinpath(*name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _defined(package: str, name: str) -> _Place:
    """Returns where ``from package import name`` finds it; for a module (its name, "")."""
    whole = f"{package}.{name}"
    if _path(whole).is_file():
        return whole, ""
    if _path(package).name != "__init__.py":
        return package, name
    for path in sorted(_path(package).parent.glob("*.py")):  # a package that exports it
        inner = f"{package}.{path.stem}"
        if path.name != "__init__.py" and name in _tops(path):
            return inner, name
    raise UsageError(f"no module of {package} defines {name}")


@functools.cache
def _tops(path: Path) -> frozenset[str]:
    """Returns the names that the module defines."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return frozenset(name for node in body for name in _names(node))


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (t.id for t in targets if isinstance(t, ast.Name))


def _source(module: _Module, node: ast.stmt) -> str:
    """Returns the statement's own text, without the names of moediag's modules before a dot."""
    lines = module.text.splitlines()
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)]) - 1
    cuts = [
        (child.value.lineno - 1, child.value.col_offset, child.value.id)
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name)
        and module.own.get(child.value.id, ("", "-"))[1] == ""
    ]  # fmt: skip
    for row, column, name in sorted(cuts, reverse=True):
        line = lines[row].encode()  # columns count bytes
        lines[row] = (line[:column] + line[column + len(name) + 1 :]).decode()
    return "\n".join(lines[first : node.end_lineno])


def _order(modules: Mapping[str, _Module]) -> list[str]:
    """Returns the modules so that each comes after those from which it imports."""
    found: list[str] = []

    def visit(name: str) -> None:
        for target, _ in modules[name].own.values():
            if target in modules and target not in found and target != name:
                visit(target)
        if name not in found:
            found.append(name)

    for name in modules:
        visit(name)
    return found


def _in(module: _Module, needed: Mapping[_Place, str]) -> list[_Place]:
    """Returns the needed places of a module in the order of its lines."""
    own = [place for place in needed if place[0] == module.name]
    return sorted(own, key=lambda place: module.made[place[1]].lineno)
