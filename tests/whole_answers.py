"""Holds what code returned to a test, whole, against a stored file for each module of tests.

So a test asserts what its name says, and no field of an answer changes unseen. Fields that have
their default value are left out, so that a new field changes no stored answer, and so are values
that are too long to be read in a difference.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from tests import golden_lines

LONGEST = 1_000, 8_000  # characters of one value, of an answer


def hold(item: pytest.Function, answers: list[Any]) -> None:
    """Compares the answers with those stored for this test. A new test has none until the next
    ``make golden``."""
    if answers:
        place = str(item.funcargs.get("tmp_path", "\0"))
        module = Path(item.path)
        every = (_stored(one, place) for one in answers)
        found = [one for one in every if len(json.dumps(one)) < LONGEST[1]]
        name = f"answers/{module.parent.name}-{module.stem.removeprefix('test_')}.json"
        golden_lines.hold(name, item.nodeid.partition("::")[2], found, needed=False)


def listen(item: pytest.Function, patch: pytest.MonkeyPatch, *packages: str) -> list[Any]:
    """Returns a list to which each function of ``packages`` adds what it returns to the test's
    module, which imports it or its module by name."""
    answers: list[Any] = []
    for holder in (item.module, *vars(item.module).values()):
        if holder is item.module or (isinstance(holder, ModuleType) and _of(holder, packages)):
            for name, found in list(vars(holder).items()):
                if isinstance(found, FunctionType) and _of(found, packages):
                    patch.setattr(holder, name, _heard(found, str(item.path), answers))
    return answers


def _of(found: ModuleType | FunctionType, packages: tuple[str, ...]) -> bool:
    name = found.__name__ if isinstance(found, ModuleType) else found.__module__
    return name.startswith(packages)


def _heard(function: FunctionType, test: str, answers: list[Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        if sys._getframe(1).f_code.co_filename == test and not inspect.isgenerator(found):
            answers.append(found)
        return found

    return called


def _stored(value: Any, place: str) -> Any:
    """Returns data for JSON; ``place`` is another folder in each run."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if _told(value, f)}
        full = {name: _stored(one, place) for name, one in own.items()}
        return {name: one for name, one in full.items() if len(json.dumps(one)) < LONGEST[0]}
    if isinstance(value, dict):
        return {str(key): _stored(one, place) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_stored(one, place) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(_stored(one, place)) for one in value)
    if isinstance(value, (str, Path)):
        return str(value).replace(place, "PLACE")
    return value if isinstance(value, (bool, int, float, type(None))) else type(value).__name__


def _told(value: Any, field: dataclasses.Field[Any]) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return bool(getattr(value, field.name) != default)
