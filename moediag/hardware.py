"""Cores, memory, GPUs and programs of this machine, as the system reports them."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, as the driver reports it."""

    name: str
    memory: str  # in MiB
    driver: str  # version


def machine() -> dict[str, Any]:
    """Returns facts about this machine to record in results; none identifies a person."""
    return {
        "os": os_name(),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "cores": cores(),
        "memory_gb": round(total_memory() / 10**9, 1),
        "gpus": [gpu.name for gpu in gpus()],
        "driver": next((gpu.driver for gpu in gpus()), None),
    }


def cores() -> int:
    """Returns the number of cores that affinity and the container's quota allow."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 1
    quota = read_text("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
        count = min(count, max(1, int(quota[0]) // int(quota[1])))
    return count


def total_memory() -> int:
    """Returns the bytes of memory, within the container's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = read_text("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def memory() -> tuple[int, int]:
    """Returns total and available bytes, within the container's limit."""
    import psutil  # type: ignore[import-untyped]

    now, total = psutil.virtual_memory(), total_memory()
    free = int(now.available)
    if total < now.total:
        used = read_text("/sys/fs/cgroup/memory.current").strip()
        free = min(free, total - int(used or 0))
    return total, max(0, free)


def gpus() -> list[Gpu]:
    """Returns the GPUs that nvidia-smi reports; empty without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = "--query-gpu=name,memory.total,driver_version"
    output = output_of([tool, query, "--format=csv,noheader,nounits"])
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    return [Gpu(*row) for row in rows if len(row) == 3]


def driver_gpus() -> list[str]:
    """Returns the GPUs that the kernel's driver lists, for containers without nvidia-smi."""
    try:
        return os.listdir("/proc/driver/nvidia/gpus")  # noqa: PTH208
    except OSError:
        return []


def nccl() -> str | None:
    """Returns the version of the NCCL package of this Python; None without one."""
    import importlib.metadata

    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def tool(name: str) -> Path | None:
    """Returns the path of a program beside this Python or on PATH; None if there is none."""
    beside = Path(sysconfig.get_path("scripts")) / name
    found = shutil.which(name)
    if os.access(beside, os.X_OK):
        return beside
    return Path(found) if found else None


def ptrace_scope() -> str:
    return read_text("/proc/sys/kernel/yama/ptrace_scope").strip() or "absent"


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def output_of(command: list[str]) -> str:
    """Returns what a program prints; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.platform(terse=True)
