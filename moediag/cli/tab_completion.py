"""`moediag completion`, and the words that it completes. Asks no network."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from moediag.report import stdout

VARIABLE = "_MOEDIAG_COMPLETE"  # set by the shell's script
_TYPED = "COMP_WORDS"
_INDEX = "COMP_CWORD"
_BEGUN = "_MOEDIAG_BEGUN"  # "model.family=" if bash replaces only what comes after it


def asked() -> bool:
    """Whether a shell asks for words; prepares typer for that."""
    if VARIABLE not in os.environ:
        return False
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()
    if os.environ[VARIABLE] == "complete_bash" and {_TYPED, _INDEX} <= os.environ.keys():
        with suppress(ValueError):  # an open quote, or no number
            _joined()
    return True


def _joined() -> None:
    """bash splits words at "=", and replaces only the last of them: ``--set a = b`` becomes
    ``--set b``, begun with ``a=``."""
    index = int(os.environ[_INDEX])
    words = shlex.split(os.environ[_TYPED])[: index + 1]
    words += [""] * (len(words) == index)  # nothing is typed of the last word
    joined: list[str] = []
    for word in words:
        if joined and (word == "=" or joined[-1].endswith("=")) and not joined[-1].startswith("--"):
            joined[-1] += word
        else:
            joined.append(word)
    begun, equals, joined[-1] = joined[-1].rpartition("=")
    os.environ[_BEGUN] = begun + equals
    os.environ[_TYPED] = shlex.join(joined)
    os.environ[_INDEX] = str(len(joined) - 1)


class Shell(str, Enum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="Your shell.")],
) -> None:
    """Print the program that completes words of moediag with Tab in a shell.

    bash: `moediag completion bash >> ~/.bashrc`. zsh: `moediag completion zsh >> ~/.zshrc`. fish:
    `moediag completion fish > ~/.config/fish/completions/moediag.fish`. Then open a new terminal.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    name, variable = "moediag", VARIABLE
    stdout.line(get_completion_script(prog_name=name, complete_var=variable, shell=shell.value))


def scenarios(incomplete: str) -> list[str]:
    """Scenarios of the catalogue, and scenario files."""
    from moediag.scenario import catalogue

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
    from moediag.scenario import catalogue
    from moediag.scenario.load import load

    # The option has no value yet, so the words before it are not parsed into parameters.
    named = context.params.get("name") or next(iter(context.args), "")
    with suppress(MoediagError):
        found = load(catalogue.find(str(named))).variants
        return [name for name in found if name.startswith(incomplete)]
    return []


def families(incomplete: str) -> list[str]:
    """Model families."""
    from moediag.families import FAMILIES

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
    from moediag.stacks.built import list_environments

    for environment in list_environments():
        for name, version in environment.versions.items():
            if name in ("transformers", "accelerate") and version:
                yield name, version


def _pairs(incomplete: str, known: Iterable[str]) -> list[str]:
    begun = os.environ.get(_BEGUN, "")
    found = (text for text in dict.fromkeys(known) if text.startswith(begun + incomplete))
    return [text.removeprefix(begun) for text in found]
