"""Checks the arguments of moediag's functions as the command line checks its options: each error
is a :class:`UsageError` that begins with the name and the value of the argument."""

from __future__ import annotations

import difflib
import errno
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moediag.errors import UsageError

MOST_SECONDS = 2_000_000  # 23 days; calls of the system that wait take no more
MOST_WHOLE = 2**31 - 1
_FIRST_DUMPS = 1_546_300_800  # 2019; torch wrote none before
_CLOCK_SKEW = 86_400.0  # seconds that another machine's clock may be ahead
_SHOWN = 200  # characters of a value in a message
_MAY_FAIL_LATER = (errno.ENOENT, errno.EACCES)  # errors of a path that does not exist yet


def whole(name: str, value: int | None, least: int, optional: bool = False) -> None:
    """``value`` is a whole number from ``least`` on, or None where it is ``optional``."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_WHOLE:
        raise _wrong(name, value, f"give a whole number of {least} or more")


def seconds(name: str, value: float | None, optional: bool = False) -> None:
    """``value`` is a number of seconds above 0, or None where it is ``optional``."""
    if value is None and optional:
        return
    above(name, value, "a number of seconds", MOST_SECONDS)


def above(name: str, value: float | None, what: str, most: float = math.inf) -> None:
    """``value`` is a number above 0, and not above ``most``. ``what``: what it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        limit = f" and not above {most}" if most < math.inf else ""
        raise _wrong(name, value, f"give {what} above 0{limit}")


def moment(given: str, value: object) -> None:
    """``value`` is a time at which dumps can have been written, in seconds since 1970. ``given``:
    how the user wrote it."""
    help_text = "Give seconds since 1970, or 2025-01-31T12:00:00 on the command line."
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise UsageError(f"{given}: not a time", help_text)
    if not _FIRST_DUMPS < value < time.time() + _CLOCK_SKEW:
        day = "in the future" if value > _FIRST_DUMPS else "before torch wrote any dump"
        raise UsageError(f"{given}: the time is {day}", help_text)


def flag(name: str, value: object) -> None:
    """``value`` is True or False."""
    if not isinstance(value, bool):
        raise _wrong(name, value, "give True or False")


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
    if str(text).endswith(":"):
        raise UsageError(f"{given}: the pattern is empty", f"Give {name} or {name}:PATTERN.")


def function(name: str, value: object) -> None:
    """``value`` can be called."""
    if not callable(value):
        raise _wrong(name, value, "give a function")


def exception(name: str, value: object) -> None:
    """``value`` is an exception, or None."""
    if value is not None and not isinstance(value, BaseException):
        raise _wrong(name, value, "give an exception")


def path(name: str, value: object, optional: bool = False) -> None:
    """``value`` is a string or a path that can exist; or None where it is ``optional``."""
    if value is None and optional:
        return
    if not isinstance(value, (str, Path)) or not str(value):
        raise _wrong(name, value, "give a path or a name")
    try:
        os.lstat(value)
    except ValueError as error:  # a null character
        raise _wrong(name, value, f"{error}; give a path or a name") from None
    except OSError as error:
        if error.errno not in _MAY_FAIL_LATER:
            raise _wrong(name, value, f"{error.strerror}; give a path or a name") from None


def words(name: str, value: object, example: str, each: str) -> None:
    """``value`` is a list of strings. ``each``: what one of them is."""
    for word in sequence(name, value, example):
        if not isinstance(word, (str, Path)) or "\0" in str(word):
            raise _wrong(name, value, f"{each} is a string without null characters")


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


def mapping(
    name: str, value: Mapping[Any, Any] | None, example: str, values: type = object
) -> None:
    """``value`` maps names to ``values``, or is None."""
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and key and isinstance(one, values) and one != ""
        for key, one in value.items()
    ):
        raise _wrong(name, value, f"give a dictionary, as {example}")


def _wrong(name: str, value: object, advice: str) -> UsageError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    return UsageError(f"{name}={shown} cannot be used", f"{advice[0].upper()}{advice[1:]}.")
