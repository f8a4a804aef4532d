"""JSON Schemas of what moediag writes, made from the types of the records that it writes.

A *shape* is a type, a list with the shape of its items, a tuple of shapes of which one fits, or a
dictionary with the shape of each field. A field whose name ends in ``?`` may be absent.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from docs.generate.result_fields import class_record

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TEXT, _NULL = {"type": "string"}, {"type": "null"}
_PLAIN: dict[Any, dict[str, Any]] = {
    str: _TEXT, Path: _TEXT, datetime: _TEXT, None: _NULL, type(None): _NULL, Any: {},
    bool: {"type": "boolean"}, int: {"type": "integer"},
    # JSON has no numbers for the last three.
    float: {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]},
}  # fmt: skip


def document(title: str, description: str, shape: Any) -> dict[str, Any]:
    """Returns the schema of a whole file or of what ``--json`` prints. It requires every field
    that this release writes, and allows further ones."""
    known: dict[str, Any] = {}
    body = _schema(shape, known)
    return {"$schema": DRAFT, "title": title, "description": description, **body, "$defs": known}


def fields(record: type, without: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the shape of each field of a dataclass, as ``dataclasses.asdict`` writes it beside
    other fields of an object."""
    hints = typing.get_type_hints(record)
    told = {field.name: field.meaning for field in class_record(record).fields}
    names = [field.name for field in dataclasses.fields(record) if field.name not in without]
    return {name: Annotated[hints[name], told[name]] for name in names}


def _schema(shape: Any, known: dict[str, Any]) -> dict[str, Any]:
    if isinstance(shape, list):
        return {"type": "array", "items": _schema(shape[0], known)}
    if isinstance(shape, tuple):
        return {"anyOf": [_schema(one, known) for one in shape]}
    if isinstance(shape, dict):
        return _object(shape, known)
    if dataclasses.is_dataclass(shape):
        return _reference(typing.cast("type", shape), known)
    if isinstance(shape, type) and issubclass(shape, enum.Enum):
        return {"enum": [str(member.value) for member in shape]}
    if isinstance(shape, Hashable) and shape in _PLAIN:
        return dict(_PLAIN[shape])
    return _generic(shape, known)


def _object(shape: Mapping[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    properties = {name.rstrip("?"): _schema(item, known) for name, item in shape.items()}
    required = [name for name in shape if not name.endswith("?")]
    return {"type": "object", "properties": properties, "required": required}


def _reference(record: type, known: dict[str, Any]) -> dict[str, Any]:
    """Refers to the schema of a dataclass, which ``known`` gets when it is met first."""
    name = record.__name__
    if name not in known:
        known[name] = {}  # it may refer to itself
        known[name] = {
            "description": class_record(record).meaning,
            **_object(fields(record), known),
        }
    return {"$ref": f"#/$defs/{name}"}


def _generic(shape: Any, known: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(shape), typing.get_args(shape)
    if origin is Annotated:
        described = {"description": shape.__metadata__[0]} if shape.__metadata__[0] else {}
        return {**_schema(args[0], known), **described}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(one, known) for one in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple and args[-1] is not Ellipsis:
        items = [_schema(one, known) for one in args]
        size = len(items)
        return {"type": "array", "prefixItems": items, "minItems": size, "maxItems": size}
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(args[1], known)}
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return {"type": "array", "items": _schema(args[0], known)}
    raise TypeError(f"{shape!r} has no schema")
