"""Checks the arguments of moediag's functions as the command line checks its options: each error
is a :class:`UsageError` that begins with the name and the value of the argument."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moediag.errors import UsageError


def whole(name: str, value: int | None, least: int, optional: bool = False) -> None:
    """``value`` is a whole number from ``least`` on, or None where it is ``optional``."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _wrong(name, value, f"give a whole number of {least} or more")


def seconds(name: str, value: float | None) -> None:
    """``value`` is a number of seconds above 0, or None."""
    if value is not None:
        above(name, value, "a number of seconds")


def above(name: str, value: float, what: str) -> None:
    """``value`` is a number above 0. ``what``: what it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise _wrong(name, value, f"give {what} above 0")


def one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise _wrong(name, value, f"give one of {', '.join(known)}")


def law(given: str, text: object, known: Sequence[str]) -> None:
    """``text`` begins with one of the ``known`` laws, perhaps followed by ``:`` and a pattern of
    names. ``given``: how the user wrote it."""
    name = text.partition(":")[0] if isinstance(text, str) else text
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(f"{given}: there is no law {name!r}", f"{hint}Laws: {', '.join(known)}.")


def function(name: str, value: object) -> None:
    """``value`` can be called."""
    if not callable(value):
        raise _wrong(name, value, "give a function")


def path(name: str, value: object, optional: bool = False) -> None:
    """``value`` is a string or a path, and not empty; or None where it is ``optional``."""
    if value is None and optional:
        return
    if not isinstance(value, (str, Path)) or not str(value):
        raise _wrong(name, value, "give a path or a name")


def words(name: str, value: object, example: str, each: str) -> None:
    """``value`` is a list of strings. ``each``: what one of them is."""
    for word in sequence(name, value, example):
        if not isinstance(word, (str, Path)):
            raise _wrong(name, value, f"{each} is a string")


def sequence(name: str, value: object, example: str) -> Sequence[Any]:
    """Returns ``value``, which is a list and no string."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise _wrong(name, value, f"give a list, as {example}")
    return value


def command(name: str, value: object) -> None:
    """``value`` is a command as a list of strings."""
    words(name, value, '["python", "train.py"]', "each word of a command")
    if not value or not str(value[0]):  # type: ignore[index]
        raise _wrong(name, value, 'give a command as a list, as ["python", "train.py"]')


def mapping(name: str, value: Mapping[Any, Any] | None, example: str) -> None:
    """``value`` maps names to values, or is None."""
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong(name, value, f"give a dictionary, as {example}")


def _wrong(name: str, value: object, advice: str) -> UsageError:
    return UsageError(f"{name}={value!r} cannot be used", f"{advice[0].upper()}{advice[1:]}.")
