"""Loads a scenario: reads the file, applies overrides, validates. Each mistake is one line of the
error, with its position."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moediag.errors import ScenarioError
from moediag.lab.scenario import content, explain
from moediag.lab.scenario.checks import check
from moediag.lab.scenario.explain import Problem
from moediag.lab.scenario.overrides import apply, location
from moediag.lab.scenario.schema import Scenario
from moediag.lab.scenario.source import KeyPath, Source, read

_MOST = 20  # mistakes that an error lists
_DEEPEST = 5  # levels of sections that require fields


def load(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Returns the scenario in ``path`` with ``overrides`` ("model.experts=16") applied.

    Raises ScenarioError: ``FILE:LINE:COLUMN: FIELD: what``, or ``--set TEXT: FIELD: what`` if an
    override caused it.
    """
    source = read(Path(path))
    content.make_absolute(source.data, source.path.parent)
    given = apply(source.data, overrides)
    content.make_absolute(source.data, Path())  # those of the command line
    try:
        scenario = Scenario.model_validate(source.data)
    except ValidationError as error:
        found = explain.problems(error.errors(include_url=False), source.data)
        raise _error([*found, *_beside(found, source.data)], source, given) from None
    found = list(check(scenario))
    if found:
        raise _error(found, source, given)
    return scenario.with_overrides([f"--set {text}" for text in overrides])


def _beside(found: Sequence[Problem], data: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields the mistakes between fields, so that all are told at once, in the sections that have
    none of ``found``: without a wrong field its default would be judged."""
    if any(problem.of_key and len(_inner(problem.path)) == 1 for problem in found):
        return  # which section was meant is not known
    rest, wrong = copy.deepcopy(dict(data)), set()
    for _ in range(_DEEPEST):
        for problem in found:
            path = problem.path[:-1] if problem.missing else problem.path
            _remove(rest, path)
            wrong.add(_inner(path)[:1])
        try:
            scenario = Scenario.model_validate(rest)
            break
        except ValidationError as error:  # a required field was removed: so is what requires it
            found = explain.problems(error.errors(include_url=False), rest)
    else:
        return
    for problem in check(scenario):
        if wrong.isdisjoint(_inner(path)[:1] for path in (problem.path, *problem.involved)):
            yield problem


def _inner(path: KeyPath) -> KeyPath:
    """Returns the place in the scenario or in its variant; its first part is the section."""
    return path[2:] if path[:1] == ("variants",) else path


def _remove(data: Any, path: KeyPath) -> None:
    """Removes a field. What is below a list stays."""
    for part in path[:-1]:
        data = data.get(part) if isinstance(data, dict) else None
    if path and isinstance(data, dict):
        data.pop(path[-1], None)


def _error(found: Sequence[Problem], source: Source, given: Mapping[KeyPath, str]) -> ScenarioError:
    """Returns all problems: those that an override caused, otherwise those of the file in the order
    of its lines. Missing fields come last: a misspelt field makes two problems, and the spelling is
    the one to fix."""
    ordered = sorted(found, key=lambda p: (p.missing, source.mark(p.path, p.of_key)))
    caused = ((_culprit(problem, source, given), problem) for problem in ordered)
    texts = [f"{location(by)}: {problem}" for by, problem in caused if by is not None]
    if not texts:
        marked = ((source.mark(p.path, p.of_key), p) for p in ordered)
        texts = [f"{source.path}:{mark.line}:{mark.column}: {p}" for mark, p in marked]
    more = len(texts) - _MOST
    return ScenarioError("\n".join([*texts[:_MOST], *([f"and {more} more"] if more > 0 else [])]))


def _culprit(problem: Problem, source: Source, given: Mapping[KeyPath, str]) -> str | None:
    """Returns the override that set the field, a part around it, or a field that the rule reads.
    The last one wins, as it does when they are applied."""
    begun = problem.path[:-1] if problem.missing else problem.path
    in_file = not begun or begun in source.values or begun in source.keys
    for path, override in reversed(list(given.items())):
        if any(place[: len(path)] == path for place in (problem.path, *problem.involved)):
            return override
        # A section that only the override created, e.g. modle.experts=16.
        if not in_file and path[: len(begun)] == begun:
            return override
    return None
