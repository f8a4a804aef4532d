"""System information for a bug report: the machine, a stack, the relevant variables. Never raises.

It will be published: it holds no host name, no user name, no home folder, and no value of a
variable whose name suggests a secret.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import moediag
from moediag import hardware, installed_packages
from moediag.records import dataclass

GB = 10**9
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


def here() -> Surroundings:
    """Information about this machine, this Python and what moediag itself uses."""
    return of_python(installed_packages.answer(), tools=True)


def of_python(
    answer: Mapping[str, Any], stack: str = "", problem: str = "", tools: bool = False
) -> Surroundings:
    """Information about this machine and the Python that gave ``answer``, see
    :func:`moediag.installed_packages.answer`. ``stack``: the key of its environment."""
    return Surroundings(
        machine=machine(),
        python=answer["python"],
        packages=answer["packages"],
        torch_build=answer["torch_build"],
        variables=variables(os.environ),
        stack=stack,
        problem=problem,
        tools=_looked(_TOOLS) if tools else {},
    )


def machine() -> dict[str, str]:
    """Facts of the machine, by name."""
    return _looked([
        ("OS", hardware.os_name),
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


_TOOLS: tuple[tuple[str, Callable[[], str]], ...] = (
    *((name, lambda name=name: _version(name)) for name in ("uv", "py-spy", "pystack")),
    ("ptrace scope", hardware.ptrace_scope),
)
