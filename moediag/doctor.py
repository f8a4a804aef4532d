"""Checks this machine and shows what to type if something is missing.

Each check covers one thing and never raises: a check that fails reports this as its result.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from moediag.errors import MachineError, MoediagError
from moediag.hardware import (
    Gpu,
    cores,
    driver_gpus,
    gpus,
    memory,
    output_of,
    read_text,
    tool,
)
from moediag.records import dataclass
from moediag.stacks import interpreter
from moediag.stacks.base import ENV_CACHE, cache_root

Status = Literal["ok", "warn", "fail"]
GB = 10**9


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    status: Status  # fail: moediag cannot run here; warn: it runs, but something is missing
    found: str
    advice: str = ""  # what to type; empty if nothing is needed


def checks(network: bool = True) -> list[Check]:
    """Runs every check, in the order in which to fix problems."""
    looks: list[tuple[str, Callable[[], Check]]] = [
        ("python", _python),
        ("torch", _torch),
        ("uv", _uv),
        ("py-spy", _py_spy),
        ("pystack", _pystack),
        ("ptrace", _ptrace),
        ("gpus", _gpus),
        ("loopback", _loopback),
        ("host name", _host_name),
        ("cores", _cores),
        ("memory", _memory),
        ("shared memory", _shared_memory),
        ("cache", _cache),
        ("disk", _disk),
    ]
    if network:
        looks.append(("package index", _index))
    return [_guarded(name, look) for name, look in looks]


def require_gpus(count: int, torch: str | None = None, shared: bool = False) -> None:
    """Raises MachineError unless this node has a GPU for each of ``count`` ranks, or one GPU if
    they are ``shared``. ``torch`` is the version of the ranks; default: the installed one."""
    cpu_instead = f"On the CPU: --cpu {max(2, count)}. `moediag doctor` checks this machine."
    wanted = 1 if shared else count
    found = len(gpus()) or len(driver_gpus())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
        found = min(found, len(listed))
    if found < wanted:
        hidden = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        share = f"Several ranks on one GPU: --gpus {count} --share-gpu. " if found else ""
        gpu = "GPU" if wanted == 1 else "GPUs"
        raise MachineError(f"{wanted} {gpu} requested, {found} found{hidden}", share + cpu_instead)
    installed = torch or interpreter.identity()["torch"] or ""
    if "+cpu" in installed:
        raise MachineError(
            f"torch {installed} is a CPU build and cannot use the GPUs of this machine",
            "Type: python -m pip install --force-reinstall torch",
        )


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except MoediagError as error:
        return Check(name, "fail", error.message, error.help_text)
    except Exception as error:
        return Check(name, "warn", f"could not be checked: {type(error).__name__}: {error}")


def _python() -> Check:
    found = platform.python_version()
    if not sys.platform.startswith("linux"):
        advice = "moediag is tested on Linux only. Use a Linux machine or container."
        return Check("python", "warn", f"{found} on {platform.system()}", advice)
    return Check("python", "ok", found)


def _torch() -> Check:
    found = interpreter.identity()["torch"]
    if found is None:  # the ranks of a watched job bring their own
        return Check(
            "torch",
            "warn",
            "not installed: `moediag run` and campaigns need it, other commands do not",
            "Type (CPU): python -m pip install torch --index-url "
            "https://download.pytorch.org/whl/cpu",
        )
    release = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if release < (2, 6):
        return Check("torch", "fail", found, "moediag needs torch 2.6 or newer.")
    return Check("torch", "ok", found)


def _uv() -> Check:
    from moediag.stacks.uv import find_uv

    words = output_of([str(find_uv()), "--version"]).split()
    return Check("uv", "ok", words[1] if len(words) > 1 else "found")


def _py_spy() -> Check:
    if tool("py-spy") is None:
        return Check(
            "py-spy",
            "warn",
            "not installed: stacks of hung ranks come from faulthandler, without native frames",
            "Type: python -m pip install py-spy",
        )
    return Check("py-spy", "ok", _version("py-spy") or "found")


def _pystack() -> Check:
    if tool("pystack") is None:
        return Check(
            "pystack",
            "warn",
            "not installed: native frames come from py-spy only",
            "Type: python -m pip install 'moediag[native]'",
        )
    return Check("pystack", "ok", _version("pystack") or "found")


def _ptrace() -> Check:
    """Reads the stack of a child process with py-spy, exactly as in a hang."""
    spy = tool("py-spy")
    scope = _yama()
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


def _gpus() -> Check:
    found = gpus()
    if not found:
        return Check("gpus", "ok", "none: scenarios run with --cpu N on gloo")
    torch = interpreter.identity()["torch"] or ""
    if "+cpu" in torch:
        return Check(
            "gpus",
            "warn",
            f"{_gpu_line(found)}, but torch {torch} is a CPU build",
            "Type: python -m pip install --force-reinstall torch",
        )
    return Check("gpus", "ok", f"{_gpu_line(found)}, driver {found[0].driver}")


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


def _loopback() -> Check:
    from moediag.launch.launcher import require_loopback

    require_loopback()
    return Check("loopback", "ok", "up")


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


def _cache() -> Check:
    folder = cache_root()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        advice = f"Type: export {ENV_CACHE}=/path/to/a/writable/folder"
        return Check("cache", "fail", f"cannot write to {folder}: {error.strerror}", advice)
    return Check("cache", "ok", str(folder))


def _disk() -> Check:
    folder = cache_root()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{free / GB:.1f} GB free for environments"
    if free < 2 * GB:
        status: Status = "fail" if free < GB // 4 else "warn"
        advice = f"Type: moediag stacks clean --older-than 7   (or set {ENV_CACHE})"
        return Check("disk", status, found, advice)
    return Check("disk", "ok", found)


def _index() -> Check:
    from moediag.stacks.indexes import read_config, redacted
    from moediag.stacks.releases import files

    config = read_config()
    where = str(config.bundle) if config.bundle else redacted((*config.indexes, "none")[0])
    try:
        listing = files("accelerate", replace(config, timeout=min(config.timeout, 5.0)))
    except MoediagError as error:
        advice = "Stacks that are already built still run. " + error.help_text
        return Check("package index", "warn", error.message, advice)
    if listing.unreachable:
        return Check("package index", "warn", "; ".join(listing.unreachable))
    return Check("package index", "ok", f"{where} answers")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu_line(found: Iterable[Gpu]) -> str:
    names = [f"{gpu.name} ({gpu.memory} MiB)" for gpu in found]
    counted = {name: names.count(name) for name in names}
    return ", ".join(f"{count} x {name}" for name, count in counted.items()) or "none"


def _yama() -> str:
    return read_text("/proc/sys/kernel/yama/ptrace_scope").strip() or "absent"
