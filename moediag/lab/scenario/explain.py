"""Turns pydantic's errors into one sentence each, with the nearest valid name."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import ErrorDetails

from moediag.lab.scenario.schema import json_schema
from moediag.lab.scenario.source import KeyPath, dotted, nearest
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a scenario."""

    path: KeyPath  # the field
    message: str
    of_key: bool = False  # its name is wrong, not its value
    # Other fields that the rule reads: an override of one of them may have caused the problem.
    involved: tuple[KeyPath, ...] = ()
    missing: bool = False

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.message}"


def problems(errors: Sequence[ErrorDetails], data: dict[str, Any]) -> list[Problem]:
    """Returns one problem per field; the failed alternatives of a union become one sentence."""
    by_place: dict[tuple[KeyPath, bool], list[ErrorDetails]] = {}
    for error in errors:
        path = _in_data(error["loc"], data, error["type"] == "missing")
        of_key = error["type"] == "extra_forbidden" or error["loc"][-1:] == ("[key]",)
        by_place.setdefault((path, of_key), []).append(error)
    return [
        Problem(path, _sentence(path, group), of_key, missing=group[0]["type"] == "missing")
        for (path, of_key), group in by_place.items()
    ]


def _in_data(loc: tuple[str | int, ...], data: Any, missing: bool) -> KeyPath:
    """Returns pydantic's location without the names of union branches in it."""
    path: list[str | int] = []
    for position, part in enumerate(loc):
        known = isinstance(data, dict) and part in data
        if known or (isinstance(data, list) and isinstance(part, int) and part < len(data)):
            path.append(part)
            data = data[part]
        elif missing and position == len(loc) - 1:
            path.append(part)
    return tuple(path)


def _sentence(path: KeyPath, errors: Sequence[ErrorDetails]) -> str:
    first = errors[0]
    kind, name = first["type"], str(path[-1]) if path else ""
    if kind == "missing":
        return "required field is missing"
    if kind == "extra_forbidden":
        return f"unknown field{nearest(name, fields_at(path[:-1]))}"
    if first["loc"][-1:] == ("[key]",):
        if kind == "literal_error":
            return f"unknown name{nearest(name, fields_at(path[:-1]))}"
        return f"a name here must be {_requirement(first)}"
    if kind == "too_short":
        return "must not be empty"
    if kind in ("model_type", "model_attributes_type", "dict_type") and first["input"] is None:
        return "is empty; give it fields or remove it"
    value = first["input"]
    wanted = list(dict.fromkeys(_requirement(error) for error in errors))
    text = f"must be {' or '.join(wanted)}, not {_shown(value)}"
    if kind == "string_type" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'{text}; quote it: "{value}"'
    if isinstance(value, str):
        choices = [c for e in errors if e["type"] == "literal_error" for c in _choices(e)]
        near = nearest(value, choices) if choices else ""
        return text + near if "did you mean" in near else text
    return text


def _requirement(error: ErrorDetails) -> str:
    context: dict[str, Any] = error.get("ctx") or {}
    bound = {k: context[k] for k in ("ge", "gt", "le", "lt", "multiple_of") if k in context}
    simple = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "text",
        "list_type": "a list",
        "dict_type": "a section of fields",
        "model_type": "a section of fields",
        "model_attributes_type": "a section of fields",
        "string_too_short": "longer",
        "greater_than_equal": f"at least {bound.get('ge')}",
        "greater_than": f"above {bound.get('gt')}",
        "less_than_equal": f"at most {bound.get('le')}",
        "less_than": f"below {bound.get('lt')}",
        "multiple_of": f"a multiple of {bound.get('multiple_of')}",
        "string_too_long": f"at most {context.get('max_length')} characters long",
    }
    if error["type"] in simple:
        return simple[error["type"]]
    if error["type"] == "literal_error":
        choices = _choices(error)
        return f"{'one of ' * (len(choices) > 1)}{', '.join(choices)}"
    if error["type"] == "string_pattern_mismatch":
        return _pattern(str(context.get("pattern")))
    return error["msg"][:1].lower() + error["msg"][1:]


def _pattern(pattern: str) -> str:
    from moediag.lab.scenario import sections

    return {
        sections.KEBAB: "lower-case words joined by hyphens, such as zero-fill",
        sections.VERSION: "one version, such as 4.53.2 (no range)",
    }.get(pattern, f"text that matches {pattern}")


def _choices(error: ErrorDetails) -> list[str]:
    """Returns the values that a literal accepts, from pydantic's ``'a', 'b' or 'c'``."""
    expected = str((error.get("ctx") or {}).get("expected", ""))
    return re.findall(r"'([^']*)'", expected) or [expected]


def _shown(value: Any) -> str:
    if value is None:
        return "null (nothing)"
    if isinstance(value, dict):
        return "a section of fields"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"


def fields_at(path: KeyPath) -> list[str]:
    """Returns the names that the schema allows below ``path``; empty if any name is allowed."""
    nodes = list(_objects(_schema()))
    for part in path:
        below = [child for node in nodes for child in _children(node, part)]
        nodes = [child for node in below for child in _objects(node)]
    names: dict[str, None] = {}
    for node in nodes:
        names.update(dict.fromkeys(node.get("properties", {})))
        names.update(dict.fromkeys(node.get("propertyNames", {}).get("enum", ())))
    return list(names)


@functools.cache
def _schema() -> dict[str, Any]:
    return json_schema()


def _objects(node: Any) -> Iterator[dict[str, Any]]:
    """Yields ``node`` with references and alternatives resolved."""
    if not isinstance(node, dict):
        return
    if "$ref" in node:
        yield from _objects(_schema()["definitions"][node["$ref"].rsplit("/", 1)[-1]])
        return
    yield node
    for word in ("allOf", "anyOf", "oneOf"):
        for branch in node.get(word, ()):
            yield from _objects(branch)


def _children(node: dict[str, Any], part: str | int) -> Iterator[Any]:
    if isinstance(part, int):
        yield node.get("items")
    elif part in node.get("properties", {}):
        yield node["properties"][part]
    else:
        yield node.get("additionalProperties")
        yield from node.get("patternProperties", {}).values()
