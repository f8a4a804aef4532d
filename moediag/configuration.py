"""Defaults of options from ``moediag.toml`` or ``[tool.moediag]`` in ``pyproject.toml``.

An option of the command line comes first, then its environment variable, then the file, then the
default. The library behind typer asks for them in this order; here the file is read and checked,
and a mistake is given its place.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from moediag.errors import UsageError
from moediag.records import dataclass

FILE, PROJECT = "moediag.toml", "pyproject.toml"
# Options that may stand in the file. Each applies to all commands that have it.
SETTINGS = (
    "allow", "details", "every", "grace", "guard", "laws", "laws-every", "log-mb", "no-color",
    "no-locals", "notify", "on-hang", "patience", "quiescence", "redact", "silence", "strict",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a file sets."""

    path: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """By name of the option without dashes; of one command ``watch.patience``."""
    text: str = ""

    def place(self, name: str) -> str:
        """Returns ``pyproject.toml:12: tool.moediag.patience``."""
        table, _, key = f"{_table(self.path)}.{name}".strip(".").rpartition(".")
        line = _line(self.text, table, key)
        return f"{self.path}:{line}: {table}.{key}".replace(": .", ": ")

    def defaults(self, group: Any) -> dict[str, dict[str, Any]]:
        """Returns command -> parameter -> value, for the commands of ``group``. Raises UsageError
        for a value of another kind than the option's."""
        found: dict[str, dict[str, Any]] = {}
        for command, parameter, option in _options(group):
            of_command = found.setdefault(command, {})
            for key in (option, f"{command}.{option}"):
                if key in self.values:
                    self._check(key, parameter)
                    of_command[parameter.name] = self.values[key]
            if option in SETTINGS and (text := os.environ.get(_variable(command, option))):
                of_command[parameter.name] = text.split() if parameter.multiple else text
        return found

    def _check(self, key: str, parameter: Any) -> None:
        """The library takes ``true`` for a number and a number for a text."""
        value = self.values[key]
        fits, wanted = _wanted(parameter, value)
        if not fits:
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            raise UsageError(f"{self.place(key)} = {shown} is not {wanted}")

    def located(self, message: str, option: str, command: str, given: Sequence[str]) -> str:
        """Returns the message about ``option``, after the variable or the place in the file that
        set it. ``given``: the command line."""
        name = option.lstrip("-")
        if any(word.partition("=")[0] == option for word in given):
            return message
        if _variable(command, name) in os.environ and name in SETTINGS:
            return f"{_variable(command, name)}: {message}"
        keys = [key for key in (f"{command}.{name}", name) if key in self.values]
        return f"{self.place(keys[0])}: {message}" if keys else message


def _variable(command: str, option: str) -> str:
    """``MOEDIAG_WATCH_ON_HANG``."""
    return f"MOEDIAG_{command}_{option}".upper().replace("-", "_")


def _options(group: Any) -> Iterator[tuple[str, Any, str]]:
    """Yields (command, parameter, name without dashes)."""
    for name, command in group.commands.items():
        for parameter in getattr(command, "params", ()):
            for option in parameter.opts:
                yield name, parameter, option.lstrip("-")


def _wanted(parameter: Any, value: object) -> tuple[bool, str]:
    """Returns whether the value is of the parameter's kind, and the kind in words."""
    if getattr(parameter, "is_flag", False):
        return isinstance(value, bool), "true or false"
    if parameter.multiple:
        return isinstance(value, list), 'a list, as ["x"]'
    if parameter.type.name.startswith(("float", "int")):
        return isinstance(value, (int, float)) and not isinstance(value, bool), "a number"
    return isinstance(value, str), "a text in quotes"


def read(folder: Path, commands: Collection[str]) -> Configuration:
    """Returns what the nearest file says, from ``folder`` upwards. Raises UsageError with file,
    line and field. ``commands``: names of commands, which may be tables."""
    for place in (folder, *folder.parents):
        for path in (place / FILE, place / PROJECT):
            text = _text(path)
            if text is not None and (path.name == FILE or f"[{_table(path)}" in text):
                return _parsed(path, text, commands)
    return Configuration()


def _text(path: Path) -> str | None:
    try:  # a device has no end, and a pipe may never be written
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError):
        return None


def _table(path: Path | None) -> str:
    return "tool.moediag" if path is not None and path.name == PROJECT else ""


def _parsed(path: Path, text: str, commands: Collection[str]) -> Configuration:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pragma: no cover

    try:
        raw: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers that are too long
        raise UsageError(f"{path}: not TOML: {error}") from None
    for part in filter(None, _table(path).split(".")):
        raw = raw.get(part, {})
    found = Configuration(path, dict(_flat(raw)), text)
    for name in found.values:
        command, _, setting = name.rpartition(".")
        _known(found.place(name), setting, SETTINGS, "a setting")
        if command:
            _known(found.place(name), command, commands, "a command")
    return found


def _known(place: str, name: str, known: Collection[str], what: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        listed = ", ".join(known)
        raise UsageError(f"{place}: {name} is not {what}", f"{hint}Known: {listed}.")


def _flat(raw: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in raw.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name.replace('_', '-')}", value


def _line(text: str, table: str, key: str) -> int:
    """Returns the line that sets ``key``; that of the table's head, else 1, if it is not found."""
    here, head = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        if opened := re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line):
            here = opened[1]
            head = number if here == table else head
        elif here == table and re.match(rf"""\s*["']?{key.replace("-", "[-_]")}["']?\s*=""", line):
            return number
    return head
