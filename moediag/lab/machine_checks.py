"""Checks of what the laboratory needs: torch, GPUs, uv, a cache, a package index."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace

from moediag.doctor import GB, Check, Status
from moediag.errors import MachineError, MoediagError
from moediag.hardware import Gpu, driver_gpus, gpus, output_of
from moediag.lab.stacks import interpreter
from moediag.lab.stacks.base import ENV_CACHE, cache_root


def checks(network: bool) -> list[tuple[str, Callable[[], Check]]]:
    """Returns the checks by name, in the order in which to fix problems. ``network``: also whether
    a package index answers."""
    looks: list[tuple[str, Callable[[], Check]]] = [
        ("torch", _torch),
        ("uv", _uv),
        ("gpus", _gpus),
        ("loopback", _loopback),
        ("cache", _cache),
        ("disk", _disk),
    ]
    return [*looks, *[("package index", _index)] * network]


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
    from moediag.lab.stacks.environment import ENV_INSTALLED
    from moediag.lab.stacks.uv import find_uv

    if os.environ.get(ENV_INSTALLED, "first") != "first":
        return Check("uv", "ok", f"not needed: {ENV_INSTALLED} is set, nothing is built")
    words = output_of([str(find_uv()), "--version"]).split()
    return Check("uv", "ok", words[1] if len(words) > 1 else "found")


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


def _loopback() -> Check:
    from moediag.lab.launch.launcher import require_loopback

    require_loopback()
    return Check("loopback", "ok", "up")


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
    from moediag.lab.stacks.indexes import read_config, redacted
    from moediag.lab.stacks.releases import files

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


def _gpu_line(found: Iterable[Gpu]) -> str:
    names = [f"{gpu.name} ({gpu.memory} MiB)" for gpu in found]
    counted = {name: names.count(name) for name in names}
    return ", ".join(f"{count} x {name}" for name, count in counted.items()) or "none"
