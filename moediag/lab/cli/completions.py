"""Words of the laboratory that Tab completes. Asks no network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import typer

from moediag.cli.tab_completion import BEGUN


def scenarios(incomplete: str) -> list[str]:
    """Scenarios of the catalogue, and scenario files."""
    from moediag.lab.scenario import catalogue

    folder, _, begun = incomplete.rpartition("/")
    files: list[str] = []
    with suppress(OSError):
        for path in sorted(Path(folder or ("/" if incomplete[:1] == "/" else ".")).iterdir()):
            name = path.name + "/" * path.is_dir()
            if path.name.startswith(begun) and (path.is_dir() or path.suffix in (".yaml", ".yml")):
                files.append(f"{folder}/{name}" if "/" in incomplete else name)
    names = [name for name in catalogue.names() if name.startswith(incomplete)]
    return names + (files if names == [] or "/" in incomplete else [])


def variants(context: typer.Context, incomplete: str) -> list[str]:
    """Variants of the scenario that was named before."""
    from moediag.errors import MoediagError
    from moediag.lab.scenario import catalogue
    from moediag.lab.scenario.load import load

    # The option has no value yet, so the words before it are not parsed into parameters.
    named = context.params.get("name") or next(iter(context.args), "")
    with suppress(MoediagError):
        found = load(catalogue.find(str(named))).variants
        return [name for name in found if name.startswith(incomplete)]
    return []


def families(incomplete: str) -> list[str]:
    """Model families."""
    from moediag.lab.families import FAMILIES

    return [name for name in FAMILIES if name.startswith(incomplete)]


def settings(incomplete: str) -> list[str]:
    """``model.family=mixtral`` for --set."""
    return _pairs(incomplete, (f"model.family={name}" for name in families("")))


def packages(incomplete: str) -> list[str]:
    """``transformers=4.53.2`` for --stack: releases with a built environment."""
    return _pairs(incomplete, (f"{name}={version}" for name, version in _built()))


def releases(incomplete: str) -> list[str]:
    """Releases of transformers with a built environment."""
    found = (version for name, version in _built() if name == "transformers")
    return [version for version in dict.fromkeys(found) if version.startswith(incomplete)]


def _built() -> Iterator[tuple[str, str]]:
    from moediag.lab.stacks.built import list_environments

    for environment in list_environments():
        for name, version in environment.versions.items():
            if name in ("transformers", "accelerate") and version:
                yield name, version


def _pairs(incomplete: str, known: Iterable[str]) -> list[str]:
    begun = os.environ.get(BEGUN, "")
    found = (text for text in dict.fromkeys(known) if text.startswith(begun + incomplete))
    return [text.removeprefix(begun) for text in found]
