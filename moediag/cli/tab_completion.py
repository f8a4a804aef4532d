"""`moediag completion`, and what a shell asks. Asks no network."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from enum import Enum
from typing import Annotated

import typer

from moediag.report import stdout

VARIABLE = "_MOEDIAG_COMPLETE"  # set by the shell's script
_TYPED = "COMP_WORDS"
_INDEX = "COMP_CWORD"
BEGUN = "_MOEDIAGBEGUN"  # "model.family=" if bash replaces only what comes after it


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
    os.environ[BEGUN] = begun + equals
    os.environ[_TYPED] = shlex.join(joined)
    os.environ[_INDEX] = str(len(joined) - 1)


class Shell(str, Enum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="Your shell.")],
) -> None:
    """Print the script for Tab completion of moediag in a shell.

    bash: `moediag completion bash >> ~/.bashrc`. zsh: `moediag completion zsh >> ~/.zshrc`. fish:
    `moediag completion fish > ~/.config/fish/completions/moediag.fish`. Then open a new terminal.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    name, variable = "moediag", VARIABLE
    stdout.line(get_completion_script(prog_name=name, complete_var=variable, shell=shell.value))
