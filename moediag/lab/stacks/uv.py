"""Runs uv: forwards its progress and turns its failures into messages with a next step."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from moediag.errors import NoEnvironments, StackError
from moediag.lab.stacks.indexes import IndexConfig
from moediag.lab.stacks.releases import NO_NETWORK_HELP

Line = Callable[[str], None]

_NO_NETWORK = (
    "error sending request", "failed to fetch", "dns error", "network was disabled",
    "network connectivity is disabled", "request failed after", "operation timed out",
    "connection refused", "tcp connect error",
)  # fmt: skip
_PROGRESS = ("warning:", "Downloading ", "Downloaded ", "Resolved ", "Prepared ")
_DISK_FULL = ("no space left on device", "os error 28", "disk quota exceeded", "os error 122")


class Unsatisfiable(StackError):
    """No set of releases fits the request."""

    help_text = "Ask for other versions with --stack, or another Python: --stack python=3.12"


def find_uv() -> Path:
    """Returns the path of uv's binary from its module, because it may not be on PATH. Raises
    StackError."""
    try:
        import uv

        return Path(uv.find_uv_bin())
    except (ImportError, FileNotFoundError) as error:
        raise NoEnvironments(
            "uv is not installed beside moediag", "Type: python -m pip install uv"
        ) from error


def run(
    arguments: Sequence[str | os.PathLike[str]],
    config: IndexConfig,
    folder: Path,
    on_line: Line | None = None,
    what: str = "",
) -> str:
    """Runs uv in ``folder``, so that it reads no project's settings; returns its output.

    ``on_line`` gets each line of stderr as it arrives. Raises StackError. Any exception, including
    Ctrl-C, also ends uv.
    """
    command = [str(find_uv()), *(os.fspath(a) for a in arguments)]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=config.uv_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        lines = []
        with process:
            try:
                for line in process.stderr or ():
                    lines.append(line.rstrip())
                    if on_line and line.strip():
                        on_line(line.strip())
                code = process.wait()
            except BaseException:
                process.kill()
                raise
        if code != 0:
            raise _error(lines, what or "uv " + " ".join(map(str, arguments[:2])))
        output.seek(0)
        return output.read()


def disk_full(where: Path) -> StackError:
    return NoEnvironments(
        f"the disk is full: nothing was kept of the environment in {where}",
        "Make room (`moediag stacks clean`, `uv cache clean`), or set MOEDIAG_CACHE (and "
        "UV_CACHE_DIR) to a folder on another disk.",
    )


def _error(lines: list[str], what: str) -> StackError:
    text = "\n".join(line for line in lines if line and not line.lstrip().startswith(_PROGRESS))
    low = text.lower()
    tail = "\n".join(text.splitlines()[-12:])
    if any(mark in low for mark in _DISK_FULL):
        return NoEnvironments(f"the disk is full: {what}\n{tail}", disk_full(Path()).help_text)
    unbuilt = re.search(r"failed to build `([^`]+)`", text, re.IGNORECASE)
    if unbuilt:
        return StackError(
            f"{what}: {unbuilt[1]} has no wheel for this Python, and building it failed\n{tail}",
            "Ask for a Python of its time, e.g. --stack python=3.10, or pin a release of it that "
            "has a wheel.",
        )
    if any(mark in low for mark in _NO_NETWORK):
        return NoEnvironments(f"no network: {what}\n{tail}", NO_NETWORK_HELP)
    if "no solution found" in low or "not satisf" in low:
        return Unsatisfiable(f"{what}: no set of releases fits\n{tail}")
    if "no interpreter found" in low or "no python" in low or "no download found" in low:
        return StackError(
            f"no such Python: {what}\n{tail}",
            "Install that Python (`uv python install 3.12`), or leave python out of --stack.",
        )
    return StackError(f"uv failed: {what}\n{tail}")
