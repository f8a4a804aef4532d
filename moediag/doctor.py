"""Checks this machine and shows what to type if something is missing.

Each check covers one thing and never raises: a check that fails reports this as its result.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from moediag import extension
from moediag.errors import MoediagError
from moediag.hardware import (
    cores,
    memory,
    ptrace_scope,
    tool,
)
from moediag.records import dataclass

Status = Literal["ok", "warn", "fail"]
GB = 10**9


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    status: Status  # fail: moediag cannot run here; warn: it runs, but something is missing
    found: str
    advice: str = ""  # what to type; empty if nothing is needed


# Programs that read stacks of hung ranks -> what is so without them, what pip installs.
_READERS = {
    "py-spy": ("stacks of hung ranks come from faulthandler, without native frames", "py-spy"),
    "pystack": ("native frames come from py-spy only", "'moediag[native]'"),
}


def checks(network: bool = True) -> list[Check]:
    """Runs every check, in the order in which to fix problems."""
    looks: list[tuple[str, Callable[[], Check]]] = [
        ("python", _python),
        *((name, functools.partial(_reader, name, *row)) for name, row in _READERS.items()),
        ("ptrace", _ptrace),
        ("host name", _host_name),
        ("cores", _cores),
        ("memory", _memory),
        ("shared memory", _shared_memory),
    ]
    if extension.missing():
        looks.append(("laboratory", _laboratory))
    else:
        looks += extension.provided("machine checks")(network)
    return [_guarded(name, look) for name, look in looks]


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except MoediagError as error:
        return Check(name, "fail", error.message, error.help_text)
    except Exception as error:
        return Check(name, "warn", f"could not be checked: {type(error).__name__}: {error}")


def _laboratory() -> Check:
    commands = ", ".join(command.name for command in extension.commands())
    return Check(
        "laboratory",
        "warn",
        f"not installed (no {extension.missing()}): {commands} need it",
        "Type: python -m pip install 'moediag[run]'",
    )


def _python() -> Check:
    found = platform.python_version()
    if not sys.platform.startswith("linux"):
        advice = "moediag is tested on Linux only. Use a Linux machine or container."
        return Check("python", "warn", f"{found} on {platform.system()}", advice)
    return Check("python", "ok", found)


def _reader(name: str, without: str, install: str) -> Check:
    if tool(name) is None:
        return Check(
            name, "warn", f"not installed: {without}", f"Type: python -m pip install {install}"
        )
    return Check(name, "ok", _version(name) or "found")


def _ptrace() -> Check:
    """Reads the stack of a child process with py-spy, exactly as in a hang."""
    spy = tool("py-spy")
    scope = ptrace_scope()
    if spy is None:
        status: Status = "ok" if scope == "0" else "warn"
        return Check("ptrace", status, f"not tried (no py-spy); Yama scope {scope}")
    program = "import sys; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        try:
            if child.stdout is not None:
                child.stdout.readline()
            done = subprocess.run(
                [str(spy), "dump", "--pid", str(child.pid), "--json"],
                capture_output=True,
                text=True,
                timeout=20,
            )
        finally:
            child.kill()
    try:
        if done.returncode == 0 and json.loads(done.stdout):
            return Check("ptrace", "ok", "py-spy reads the stack of another process")
    except ValueError:
        pass
    yama = scope not in ("0", "absent")  # otherwise the container or sandbox refuses
    advice = "Type: sudo sysctl kernel.yama.ptrace_scope=0   " if yama else ""
    return Check(
        "ptrace",
        "warn",
        f"refused (Yama scope {scope}): stacks of hung ranks come from faulthandler instead",
        f"{advice}(in a container: docker run --cap-add SYS_PTRACE)",
    )


def _cores() -> Check:
    count = cores()
    if count < 2:
        advice = "Verdicts are correct but slow. Use 2 cores or more."
        return Check("cores", "warn", str(count), advice)
    return Check("cores", "ok", str(count))


def _memory() -> Check:
    total, free = memory()
    found = f"{free / GB:.1f} GB free of {total / GB:.1f} GB"
    if free < 2 * GB:
        advice = "Two ranks need about 2 GB. Close other programs, or use --cpu 2."
        return Check("memory", "warn", found, advice)
    return Check("memory", "ok", found)


def _host_name() -> Check:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return Check(
            "host name",
            "warn",
            f"{name} does not resolve: the ranks of `torchrun --standalone` cannot meet",
            f"Type as root: echo '127.0.0.1 {name}' >> /etc/hosts",
        )
    return Check("host name", "ok", name)


def _shared_memory() -> Check:
    if not Path("/dev/shm").is_dir():  # noqa: S108 - read, not written
        return Check("shared memory", "warn", "not mounted", "NCCL needs /dev/shm.")
    size = shutil.disk_usage("/dev/shm").total  # noqa: S108
    found = f"{size / GB:.2f} GB"
    if size < 256 * 10**6:
        advice = "NCCL between GPUs needs more: docker run --shm-size=1g"
        return Check("shared memory", "warn", found, advice)
    return Check("shared memory", "ok", found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
