"""System information about an environment that moediag built."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moediag import installed_packages, system_info
from moediag.errors import StackError
from moediag.lab.stacks import environment
from moediag.lab.stacks.environment import Stack
from moediag.system_info import Surroundings

ASKING = 30.0  # seconds, timeout of the stack's Python


def of_request(request: Mapping[str, str], tools: bool = False) -> Surroundings:
    """Information about the environment of ``request``, package -> version.

    Raises StackError if it is not built: building takes minutes and does not change the report.
    """
    found = environment.ready(request)
    if found is None:
        asked = " ".join(f"--stack {name}={version}" for name, version in request.items())
        raise StackError(
            f"no environment of {', '.join(f'{n} {v}' for n, v in request.items())} is built",
            f"`moediag stacks list` shows those that are; `moediag run NAME {asked}` builds it.",
        )
    return of_stack(found, tools)


def of_stack(stack: Stack, tools: bool = False) -> Surroundings:
    """Information about this machine and ``stack``."""
    answer, problem = _asked(stack)
    return system_info.of_python(answer, stack.key, problem, tools)


def _asked(stack: Stack) -> tuple[dict[str, Any], str]:
    """The answer of the stack's own Python, or else what moediag recorded when it built it."""
    try:
        done = subprocess.run(
            [str(stack.python), str(Path(installed_packages.__file__))],
            env=stack.environ(), capture_output=True, text=True, timeout=ASKING, check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        told = json.loads(done.stdout)
        return {k: told[k] for k in ("python", "packages", "torch_build")}, ""
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        known = {name: v for name, v in stack.versions.items() if name != "python"}
        python = stack.versions.get("python") or "unknown"
        problem = f"how torch was built (the stack's Python did not answer: {type(error).__name__})"
        return {"python": python, "packages": known, "torch_build": {}}, problem
