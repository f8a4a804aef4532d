"""Dataclasses as JSON files, written atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import stat
import types
import typing
from collections import abc
from pathlib import Path
from typing import Any, BinaryIO, Dict, List, Union

SCHEMA_VERSION = 1
MOST_BYTES = 1 << 30  # of one file
_STALE = 2  # times that a file is opened again
_UNIONS = (Union, getattr(types, "UnionType", Union))  # Python 3.9 has no UnionType
_PLAIN = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_LARGEST_WHOLE = 1 << 1023  # that is a float too
_NOT_FINITE = ("nan", "inf", "-inf")  # JSON has no numbers for them, so they are text
MOST_RANKS = 1 << 17  # of a job
_SHOWN = 60  # characters of a wrong value in an error


def parse_json(text: Union[str, bytes]) -> Any:
    """Plain JSON. Raises ValueError, also for what is nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def open_stored(path: Union[str, Path]) -> BinaryIO:
    """Opens a file for reading. Raises OSError, also for what is no regular file: a device has no
    end, and a pipe may never be written."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(fd, "rb")


def read_stored(path: Union[str, Path]) -> bytes:
    """The content of a file. Raises OSError as :func:`open_stored`, and for more than MOST_BYTES. A
    network file system reports a stale handle for a file that was replaced: it is opened again."""
    for _ in range(_STALE):
        try:
            return _content(path)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return _content(path)


def _content(path: Union[str, Path]) -> bytes:
    with open_stored(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MOST_BYTES >> 20} MiB", str(path))
    return data


def read_json(path: Union[str, Path], errors: str = "strict") -> Any:
    """The JSON in a file. Raises ValueError and as :func:`read_stored`."""
    return parse_json(read_stored(path).decode("utf-8", errors))


def read_ranks(folder: Union[str, Path], pattern: str, cls: Any) -> Dict[int, Any]:
    """What ranks have written so far, without unreadable files and numbers that no job has."""
    found: Dict[int, Any] = {}
    for path in sorted(Path(folder).glob(pattern)):
        with contextlib.suppress(OSError, ValueError):
            one = build(cls, read_json(path))
            if 0 <= one.rank < MOST_RANKS and one.world_size <= MOST_RANKS:
                found[one.rank] = one
    return found


def write_json(path: Path, value: Any) -> Path:
    """Writes atomically: a reader sees the old file or the whole new one, never half of it."""
    return write_text(path, json.dumps(value, indent=1))


def write_text(path: Path, text: str) -> Path:
    """Like write_json, for text."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    try:
        temporary.replace(path)
    except FileNotFoundError:
        # A network file system that repeats a request may say so of a rename that it has done.
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            raise
    return path


def build(cls: Any, raw: Any, where: str = "") -> Any:
    """A dataclass of type ``cls`` from plain JSON, nested dataclasses included. Fields that ``cls``
    does not have are ignored; null stands for the default of a field that cannot be null. A hint
    ``Annotated[str, function]`` stands for what the function makes of the text.

    Raises ValueError that says which value is wrong, as ``trials[0].world_size``, after
    ``where``."""
    if not isinstance(raw, dict):
        raise _wrong(where, raw, "an object")
    hints = _hints(cls)
    values: Dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        at = f"{where}.{f.name}" if where else f.name
        needed = f.default is f.default_factory is dataclasses.MISSING
        if f.name not in raw:
            if needed:
                raise ValueError(f"{at} is missing")
        elif f.init and (needed or raw[f.name] is not None or _nullable(hints[f.name])):
            values[f.name] = _convert(hints[f.name], raw[f.name], at)
    return cls(**values)


@functools.lru_cache(None)
def _hints(cls: Any) -> Dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _nullable(hint: Any) -> bool:
    return hint is Any or type(None) in typing.get_args(hint)


def _wrong(where: str, value: Any, wanted: str) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    return ValueError(f"{where or 'the file'}: {shown} is not {wanted}")


def _member(members: List[Any], value: Any, where: str) -> Any:
    """The member of a union that ``value`` is: of several dataclasses the one of its ``kind``."""
    if len(members) == 1:
        return members[0]
    plain = [member for member in members if member in _PLAIN]
    for member in plain:
        if type(value) is member:
            return member
    if plain:
        raise _wrong(where, value, " or ".join(_PLAIN[member] for member in plain))
    kind = value.get("kind") if isinstance(value, dict) else None
    for member in members:
        if member.kind == kind:
            return member
    raise ValueError(f"{where}: unknown kind {kind!r}")


def _convert(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return args[1](_convert(args[0], value, where))
    if origin in _UNIONS:
        if value is None and type(None) in args:
            return None
        return _convert(
            _member([a for a in args if a is not type(None)], value, where), value, where
        )
    if origin in (list, tuple):
        return _sequence(origin, args, value, where)
    if origin in (dict, abc.Mapping):
        if not isinstance(value, dict):
            raise _wrong(where, value, "an object")
        return {
            _key(args[0], key, where): _convert(args[1], item, f"{where}.{key}")
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(hint):
        return build(hint, value, where)
    if hint in _PLAIN:
        if hint is float and value in _NOT_FINITE:
            return float(value)
        if type(value) is not hint and not (hint is float and type(value) is int):
            raise _wrong(where, value, _PLAIN[hint])
        if hint is float and type(value) is int and abs(value) > _LARGEST_WHOLE:
            raise _wrong(where, value, "a number of usual size")
        return value
    try:
        return hint(value)  # an enumeration
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _sequence(kind: Any, hints: Any, value: Any, where: str) -> Any:
    if not isinstance(value, list):
        raise _wrong(where, value, "a list")
    same = kind is list or hints[-1] is Ellipsis
    if not same and len(value) != len(hints):
        raise _wrong(where, value, f"a list of {len(hints)}")
    return kind(
        _convert(hints[0] if same else hints[i], item, f"{where}[{i}]")
        for i, item in enumerate(value)
    )


def _key(hint: Any, key: str, where: str) -> Any:
    """JSON has text for keys."""
    if hint is not int:
        return _convert(hint, key, where) if typing.get_origin(hint) is typing.Annotated else key
    try:
        return int(key)
    except ValueError:
        raise _wrong(where, key, "a whole number") from None
