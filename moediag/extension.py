"""What the laboratory adds to the job tool.

`moediag.lab` imports the job tool and is never imported by it. `moediag.lab.registered` lists its
commands and what else it provides; the job tool asks here, and everything is imported when it is
used. The laboratory's packages come with ``pip install 'moediag[run]'``.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NamedTuple

from moediag.errors import MachineError

_REGISTERED = "moediag.lab.registered"


class Command(NamedTuple):
    """A command of the command line."""

    section: str
    """Its heading in the help."""
    name: str
    target: str
    """``module:function``; of a group of commands ``module:app``."""
    example: str
    """What follows ``moediag``; empty for a group."""

    @property
    def runs_a_command(self) -> bool:
        """Whether the words after ``--`` are a command of the user."""
        return " -- " in self.example


def commands() -> tuple[Command, ...]:
    """Returns the laboratory's commands, in the order of the help."""
    found: tuple[Command, ...] = importlib.import_module(_REGISTERED).COMMANDS
    return found


def missing() -> str:
    """Returns the name of a package that the laboratory needs and that is not installed, or ""."""
    needed = importlib.import_module(_REGISTERED).NEEDED
    return next((name for name in needed if importlib.util.find_spec(name) is None), "")


def require(what: str) -> None:
    """Raises MachineError, which says how to install it, if the laboratory cannot do ``what``."""
    if lacking := missing():
        raise MachineError(
            f"{what} needs the package {lacking}, which is not installed",
            "Type: python -m pip install 'moediag[run]'",
        )


def provided(name: str) -> Any:
    """Returns what the laboratory provides as ``name``."""
    return imported(importlib.import_module(_REGISTERED).PROVIDED[name])


def imported(target: str) -> Any:
    """Returns the object that ``module:name`` says."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
