"""Uses the packages already installed for a Python, for machines that cannot build environments."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

from moediag.errors import StackError
from moediag.lab.stacks.base import NEWEST

_ASK = """
import importlib.metadata, json, platform
# Of two installed releases the one earlier on the path is imported.
every = reversed(list(importlib.metadata.distributions()))
found = {d.metadata["Name"]: d.version for d in every}
print(json.dumps({**found, "python": platform.python_version()}))
"""


def distributions(executable: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns canonical name -> version, including ``python``, as ranks would find them. Raises
    StackError."""
    try:
        done = subprocess.run(
            [str(executable), "-c", _ASK],
            env=dict(environ), capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise StackError(f"{executable} cannot say what is installed: {error}") from error
    return {str(canonicalize_name(name)): version for name, version in found.items() if name}


def check(wanted: Mapping[str, str], have: Mapping[str, str], variable: str) -> None:
    """Raises StackError for a missing or different release. An open version fits any."""
    for name, version in wanted.items():
        there = have.get(name)
        if name == "python":
            fits = f"{there}.".startswith(f"{version}.")
        else:
            fits = there is not None and version in (NEWEST, there, there.split("+")[0])
        if not fits:
            asked = name if version == NEWEST else f"{name} {version}"
            raise StackError(
                f"{asked} is wanted and {there or 'none'} is installed",
                f"{variable} runs on what is installed alone; without it environments are built.",
            )
