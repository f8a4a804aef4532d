"""Checks the arguments of moediag's functions as the command line checks its options: each error
is a :class:`UsageError` that begins with the name and the value of the argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moediag.errors import UsageError


def whole(name: str, value: int | None, least: int) -> None:
    """``value`` is a whole number from ``least`` on, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _wrong(name, value, f"give a whole number of {least} or more")


def seconds(name: str, value: float | None) -> None:
    """``value`` is a number of seconds above 0, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise _wrong(name, value, "give a number of seconds above 0")


def one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise _wrong(name, value, f"give one of {', '.join(known)}")


def path(name: str, value: object) -> None:
    """``value`` is a string or a path, and not empty."""
    if not isinstance(value, (str, Path)) or not str(value):
        raise _wrong(name, value, "give a path or a name")


def command(name: str, value: object) -> None:
    """``value`` is a command as a list of strings."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise _wrong(name, value, 'give a command as a list, as ["python", "train.py"]')
    if not all(isinstance(word, (str, Path)) for word in value):
        raise _wrong(name, value, "each word of a command is a string")


def mapping(name: str, value: Mapping[Any, Any] | None, example: str) -> None:
    """``value`` maps names to values, or is None."""
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong(name, value, f"give a dictionary, as {example}")


def _wrong(name: str, value: object, advice: str) -> UsageError:
    return UsageError(f"{name}={value!r} cannot be used", f"{advice[0].upper()}{advice[1:]}.")
