"""``--set model.experts=16``: replaces a field of the file before the file is validated."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML

from moediag.errors import ScenarioError
from moediag.lab.scenario.source import KeyPath, dotted, nearest

_STEP = r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:\[[0-9]{1,4}\])*"
_PATH = re.compile(rf"{_STEP}(?:\.{_STEP})*")


def location(override: str) -> str:
    """Returns how messages name an override, instead of FILE:LINE:COLUMN."""
    return f"--set {override}"


def apply(data: dict[str, Any], overrides: Sequence[str]) -> Mapping[KeyPath, str]:
    """Sets each ``FIELD=VALUE`` (VALUE in YAML) in ``data``; returns which override set what.

    Creates missing sections; replaces list entries or appends one. Raises ScenarioError if the
    text cannot be read or the path goes through a scalar. The schema checks whether the field
    exists and the value is valid.
    """
    done: dict[KeyPath, str] = {}
    for override in overrides:
        path, value = _parse(override)
        _check_variant(data, path, override)
        _seed(data, path)
        _put(data, path, value, override)
        done[path] = override
    return done


def _parse(override: str) -> tuple[KeyPath, Any]:
    name, equals, text = override.partition("=")
    name = name.strip()
    if not equals or not _PATH.fullmatch(name):
        raise ScenarioError(
            f"{location(override)}: not of the form FIELD=VALUE",
            "For example --set model.experts=16 or --set skew.starve[0].rank=0.",
        )
    path: list[str | int] = []
    for step in name.split("."):
        field, *indices = step.replace("]", "").split("[")
        path += [field, *map(int, indices)]
    if len(path) > 1 and path[-2] == "stack":
        return tuple(path), text.strip()  # 5.0 is a version here, not a number
    try:
        return tuple(path), YAML(typ="safe", pure=True).load(text)
    except Exception:  # ruamel: YAMLError, and AttributeError and the like on misused tags
        raise ScenarioError(f"{location(override)}: {name}: {text!r} is not YAML") from None


def _check_variant(data: dict[str, Any], path: KeyPath, override: str) -> None:
    """Raises ScenarioError for an unknown variant, which would otherwise be added, empty."""
    variants = data.get("variants")
    if len(path) < 2 or path[0] != "variants" or not isinstance(variants, dict):
        return
    if path[1] not in variants:
        raise ScenarioError(
            f"{location(override)}: {dotted(path[:2])}: no such variant"
            f"{nearest(str(path[1]), variants)}"
        )


def _seed(data: dict[str, Any], path: KeyPath) -> None:
    """Copies an inherited list or mapping into the variant before a part of it is changed."""
    if len(path) < 5 or path[0] != "variants":
        return
    section, field = path[2], path[3]
    inherited = data.get(str(section))
    variant = data["variants"][path[1]] if isinstance(data.get("variants"), dict) else None
    if not isinstance(inherited, dict) or not isinstance(variant, dict) or field not in inherited:
        return
    own = variant.get(str(section))
    if own is None:
        own = variant[str(section)] = {}
    if isinstance(own, dict):
        own.setdefault(field, copy.deepcopy(inherited[field]))


def _put(data: Any, path: KeyPath, value: Any, override: str) -> None:
    here = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        empty: Any = None if last else ([] if isinstance(path[depth + 1], int) else {})
        if isinstance(here, list) and isinstance(part, int):
            if part > len(here):
                raise ScenarioError(
                    f"{location(override)}: {dotted(path[: depth + 1])}: "
                    f"the list has {len(here)} entries"
                )
            if part == len(here):
                here.append(empty)
        elif isinstance(here, dict) and isinstance(part, str):
            if here.get(part) is None:
                here[part] = empty
        else:
            kind = "a list" if isinstance(part, int) else "a section"
            raise ScenarioError(
                f"{location(override)}: {dotted(path[:depth]) or 'the scenario'} is not {kind}"
            )
        if last:
            here[part] = value
        else:
            here = here[part]
