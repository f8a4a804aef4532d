"""The interpreter and torch that overlays are built on.

This is the interpreter that runs moediag, or the one in ``MOEDIAG_BASE_PYTHON``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from moediag.errors import StackError
from moediag.lab.stacks import interpreter
from moediag.protocol import write_json
from moediag.records import dataclass

ENV_CACHE = "MOEDIAG_CACHE"
NEWEST = ""  # in a request: the newest release
ENV_BASE = "MOEDIAG_BASE_PYTHON"


@dataclass(frozen=True, slots=True)
class Part:
    """One installed distribution."""

    name: str
    version: str
    links: dict[str, str]  # name in site-packages -> path


@dataclass(frozen=True, slots=True)
class Base:
    """An interpreter and its torch."""

    executable: Path  # as called, perhaps in a virtual environment
    real: str  # with symlinks resolved
    python: str
    torch: str | None  # None: not installed
    torch_info: str | None  # torch's metadata folder

    @property
    def identity(self) -> str:
        """A digest that changes when Python or torch is upgraded or moved."""
        text = "\n".join((self.real, self.python, self.torch or "", self.torch_info or ""))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def torch_parts(self) -> tuple[tuple[Part, ...], tuple[str, ...]]:
        """Returns torch with all its requirements, and torch's own requirement lines."""
        own = self.executable == Path(sys.executable)
        raw = interpreter.torch_parts() if own else _ask(self.executable)
        return tuple(Part(**part) for part in raw["parts"]), tuple(raw["requires"])


def cache_root() -> Path:
    """Returns the folder of environments: in ``MOEDIAG_CACHE``, else in the user's cache folder."""
    chosen = os.environ.get(ENV_CACHE)
    if chosen:
        return Path(chosen).expanduser().absolute() / "stacks"
    import platformdirs

    return platformdirs.user_cache_path("moediag") / "stacks"


def current_base(cache: Path) -> Base:
    """Returns the current base. ``cache`` keeps the answer of another interpreter.

    Raises StackError if ``MOEDIAG_BASE_PYTHON`` cannot be run.
    """
    chosen = os.environ.get(ENV_BASE)
    if not chosen or Path(chosen) == Path(sys.executable):
        return _base(Path(sys.executable), interpreter.identity())
    executable = Path(chosen).expanduser().absolute()
    kept = cache / f"base-{hashlib.sha256(str(executable).encode()).hexdigest()[:12]}.json"
    raw = _unchanged(kept)
    if raw is None:
        raw = _ask(executable)
        watched = [raw["executable"], *raw["path"]]
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, {"answer": raw, "watched": {p: _mtime(p) for p in watched}})
    return _base(executable, raw)


def _base(executable: Path, raw: dict[str, Any]) -> Base:
    return Base(executable, raw["executable"], raw["python"], raw["torch"], raw["torch_info"])


def _unchanged(kept: Path) -> dict[str, Any] | None:
    """Returns the kept answer, unless the interpreter or one of its folders has changed."""
    try:
        record = json.loads(kept.read_text(encoding="utf-8"))
        same = all(_mtime(path) == mtime for path, mtime in record["watched"].items())
        return dict(record["answer"]) if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mtime(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return -1


def _ask(executable: Path) -> dict[str, Any]:
    import subprocess

    try:
        done = subprocess.run(
            [str(executable), str(Path(interpreter.__file__))],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        raise StackError(
            f"{ENV_BASE}={executable} cannot be used: {detail.strip()[-400:]}",
            f"Set {ENV_BASE} to a Python >= 3.9 that has torch, or unset it.",
        ) from error
    if answer.get("torch") and "parts" not in answer:
        raise StackError(f"{ENV_BASE}={executable}: torch is installed without metadata")
    return dict(answer)
