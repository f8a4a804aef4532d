"""System information for a bug report: the machine, a stack, the relevant variables. Never raises.

It will be published: it holds no host name, no user name, no home folder, and no value of a
variable whose name suggests a secret.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import moediag
from moediag import hardware
from moediag.errors import StackError
from moediag.records import dataclass
from moediag.stacks import environment
from moediag.stacks.base import cache_root
from moediag.stacks.environment import Stack
from moediag.upstream import installed_packages

GB = 10**9
ASKING = 30.0  # seconds, timeout of another Python
MOST = 60  # variables
MOST_VALUE = 160  # characters of one
_RELEVANT = re.compile(
    r"^(NCCL|TORCH|TORCHELASTIC|PYTORCH|CUDA|GLOO|TRITON|ACCELERATE|FSDP|UCX|FI|HSA|HIP|ROCR|MOEDIAG)_"
    r"|^(OMP_NUM_THREADS|MKL_NUM_THREADS|TOKENIZERS_PARALLELISM|PYTHONHASHSEED|PYTHONOPTIMIZE)$"
)
_SECRET = re.compile(
    r"TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|_KEY|KEY_|APIKEY|PRIVATE", re.IGNORECASE
)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_HIDDEN = "(set, left out)"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The information, in the order of a report."""

    machine: Mapping[str, str]
    python: str
    #: Package -> version, None if it is not installed.
    packages: Mapping[str, str | None]
    #: From torch's own version file.
    torch_build: Mapping[str, str]
    #: Those that change how ranks communicate.
    variables: Mapping[str, str] = field(default_factory=dict)
    #: Key of the environment, "" for this Python.
    stack: str = ""
    problem: str = ""
    tools: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "stack": self.stack or None,
            "python": self.python,
            "packages": dict(self.packages),
            "torch_build": dict(self.torch_build),
            "variables": dict(self.variables),
            "tools": dict(self.tools),
            "problem": self.problem or None,
        }

    def lines(self) -> list[str]:
        """One fact per line."""
        found = [f"- moediag: {moediag.__version__}", f"- Python: {self.python}"]
        for name, version in self.packages.items():
            built = f" ({self._built()})" if name == "torch" and self.torch_build else ""
            found.append(f"- {name}: {version or 'not installed'}{built}")
        found += [f"- {name}: {text}" for name, text in self.machine.items()]
        found += [f"- {name}={value}" for name, value in self.variables.items()]
        if self.stack:
            found.append(f"- environment: {self.stack}, built by moediag")
        if self.problem:
            found.append(f"- unknown: {self.problem}")
        return found + [f"- {name}: {text}" for name, text in self.tools.items()]

    def _built(self) -> str:
        build = self.torch_build
        parts = [f"CUDA {build['cuda']}" if build.get("cuda", "none") != "none" else "CPU build"]
        if build.get("hip", "none") != "none":
            parts = [f"HIP {build['hip']}"]
        if build.get("git_version"):
            parts.append(f"git {build['git_version'][:10]}")
        if build.get("debug") == "True":
            parts.append("debug")
        return ", ".join(parts)


def here(stack: Stack | None = None, tools: bool = False) -> Surroundings:
    """Information about this machine and ``stack``, by default this Python.

    ``tools`` adds what moediag itself uses, for a report about moediag.
    """
    if stack is None:
        told, problem = installed_packages.answer(), ""
    else:
        told, problem = _asked(stack)
    return Surroundings(
        machine=machine(),
        python=told["python"],
        packages=told["packages"],
        torch_build=told["torch_build"],
        variables=variables(os.environ),
        stack=stack.key if stack is not None else "",
        problem=problem,
        tools=_looked(_TOOLS) if tools else {},
    )


def built(request: Mapping[str, str]) -> Stack | None:
    """The environment of ``request``, None for an empty request.

    Raises StackError if it is not built: building takes minutes and does not change the report.
    """
    if not request:
        return None
    found = environment.ready(request)
    if found is None:
        asked = " ".join(f"--stack {name}={version}" for name, version in request.items())
        raise StackError(
            f"no environment of {', '.join(f'{n} {v}' for n, v in request.items())} is built",
            f"`moediag stacks list` shows those that are; `moediag run NAME {asked}` builds it.",
        )
    return found


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


def machine() -> dict[str, str]:
    """Facts of the machine, by name."""
    return _looked([
        ("OS", _os),
        ("kernel", lambda: f"{platform.release()} {platform.machine()}"),
        ("libc", lambda: " ".join(platform.libc_ver()).strip() or "unknown"),
        ("CPU", _cpu),
        ("memory", _memory),
        ("GPUs", _gpus),
        ("driver", lambda: next((gpu.driver for gpu in hardware.gpus()), "none")),
    ])  # fmt: skip


def _looked(looks: Iterable[tuple[str, Callable[[], str]]]) -> dict[str, str]:
    """The facts; one that cannot be read says so, because a report must not fail."""
    found = {}
    for name, look in looks:
        try:
            found[name] = look()
        except Exception as error:
            found[name] = f"unknown ({type(error).__name__})"
    return found


def _os() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.platform(terse=True)


def _cpu() -> str:
    named = re.search(r"^model name\s*:\s*(.+)$", hardware.read_text("/proc/cpuinfo"), re.MULTILINE)
    return f"{named[1].strip() if named else platform.machine()}, {hardware.cores()} cores usable"


def _memory() -> str:
    total, free = hardware.memory()
    return f"{total / GB:.1f} GB, {free / GB:.1f} GB free"


def _gpus() -> str:
    names = [f"{gpu.name} ({gpu.memory} MiB)" for gpu in hardware.gpus()]
    return ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names)) or "none"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those that change how ranks compute and communicate, without secrets and personal folders."""
    home = str(Path.home())
    found: dict[str, str] = {}
    for name in sorted(environ):
        if not _RELEVANT.search(name) or len(found) == MOST:
            continue
        if _SECRET.search(name):
            found[name] = _HIDDEN
            continue
        value = " ".join(_LOGIN.sub("", environ[name]).split())
        if len(home) > 1:
            value = value.replace(home, "~")
        found[name] = value if len(value) <= MOST_VALUE else f"{value[:MOST_VALUE]}…"
    return found


# ------------------------------------------------------------------------ for reports about moediag


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _built() -> str:
    """Counted, not looked into: that takes seconds where there are many."""
    folder = cache_root() / "envs"
    return str(sum(1 for one in folder.iterdir() if one.is_dir())) if folder.is_dir() else "0"


def _yama() -> str:
    return hardware.read_text("/proc/sys/kernel/yama/ptrace_scope").strip() or "absent"


_TOOLS: tuple[tuple[str, Callable[[], str]], ...] = (
    *((name, lambda name=name: _version(name)) for name in ("uv", "py-spy", "pystack")),
    ("ptrace scope", _yama),
    ("built stacks", _built),
)
