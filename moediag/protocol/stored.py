"""Dataclasses as JSON files, written atomically."""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from pathlib import Path
from typing import Any, Dict, List, Union

SCHEMA_VERSION = 1


def write_json(path: Path, value: Any) -> Path:
    """Writes atomically: a reader sees the old file or the whole new one, never half of it."""
    return write_text(path, json.dumps(value, indent=1))


def write_text(path: Path, text: str) -> Path:
    """Like write_json, for text."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path


def build(cls: Any, raw: Any) -> Any:
    """A dataclass of type ``cls`` from plain JSON, nested dataclasses included."""
    hints = typing.get_type_hints(cls)
    values: Dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.init and f.name in raw:
            values[f.name] = _convert(hints[f.name], raw[f.name])
    return cls(**values)


def _member(members: List[Any], value: Any) -> Any:
    """The member of a union that ``value`` is: of several dataclasses the one of its ``kind``.
    Raises ValueError where there is none."""
    if len(members) == 1:
        return members[0]
    for member in members:
        if member.kind == value["kind"]:
            return member
    raise ValueError(f"unknown kind {value['kind']!r}")


def _convert(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Union:
        return _convert(_member([a for a in args if a is not type(None)], value), value)
    if origin is list:
        return [_convert(args[0], item) for item in value]
    if origin is dict:
        return {key: _convert(args[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return build(hint, value)
    return value
