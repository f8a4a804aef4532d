"""Environments of exact releases, built once and found again in milliseconds.

On disk, ``requests/KEY.json`` is the exact resolution of a request on this Python and torch, and
``envs/KEY`` is the environment of one resolution, shared by all requests with that resolution
(:mod:`moediag.lab.stacks.construct`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import moediag
from moediag.errors import NoEnvironments, NoSuchRelease, StackError
from moediag.lab.stacks import construct
from moediag.lab.stacks.base import ENV_CACHE, Base, cache_root, current_base
from moediag.protocol import write_json
from moediag.records import dataclass

if TYPE_CHECKING:
    # Modules that access indexes are imported only when something must be built.
    from moediag.lab.stacks.resolve import Progress, Resolution

# Run on the base unchanged. "first": build if it does not fit; any other value: never build.
ENV_INSTALLED = "MOEDIAG_INSTALLED"
NEWEST_VALID = 24 * 3600.0  # seconds for which "the newest release" is cached

# Variables that would add other packages to an environment or slow down every start.
_UNSET = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONDONTWRITEBYTECODE")


@dataclass(frozen=True, slots=True)
class Stack:
    """An environment that is ready to use."""

    python: Path  # its interpreter
    # Of python, torch, transformers, accelerate and what was requested; None: not installed.
    versions: dict[str, str | None]
    key: str  # short name of the exact resolution
    seconds: float  # time that this call took
    pythonpath: list[Path]  # for PYTHONPATH, so that ranks can import moediag
    cutoff: datetime | None = None  # companions are older than this
    notes: tuple[str, ...] = ()  # what a reader of the result must know
    kind: str = "overlay"
    resolution: tuple[str, ...] = ()  # ``name==version`` of all installed packages
    pycache: Path | None = None

    def environ(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Returns ``base`` (default: this process's variables) adapted for ranks in this stack.

        Python must write bytecode, else every start compiles torch and transformers again. If
        torch's folder is read-only, bytecode goes into the cache.
        """
        child = dict(os.environ if base is None else base)
        for name in _UNSET:
            child.pop(name, None)
        child["PYTHONPATH"] = os.pathsep.join(map(str, self.pythonpath))
        child["PYTHONNOUSERSITE"] = "1"
        if self.pycache is not None:
            child["PYTHONPYCACHEPREFIX"] = str(self.pycache)
        return child


def rank_path() -> Path:
    """Returns a folder for PYTHONPATH with only a link to the moediag package: ranks can import
    moediag, but no other package of its environment."""
    package = Path(moediag.__file__).resolve().parent
    digest = hashlib.sha256(str(package).encode()).hexdigest()[:12]
    folder = cache_root() / "rank-path" / digest
    link = folder / "moediag"
    if not (link.is_symlink() and link.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another moediag has just created it
            link.unlink(missing_ok=True)
            link.symlink_to(package, target_is_directory=True)
    return folder


def ensure(request: Mapping[str, str], progress: Progress | None = None) -> Stack:
    """Returns the environment for ``request`` ({"transformers": "4.53.2", …}), built if missing.

    A request names releases; "" or "newest" is the newest. Other packages are resolved as of the
    upload day of its newest pinned release. The base's torch is reused; only a request for another
    torch or Python builds a full environment. ``progress`` gets a text and a fraction (0..1) or
    None. Raises StackError and NoSuchRelease.
    """
    started = time.perf_counter()
    report: Progress = progress or (lambda _text, _fraction: None)
    root = cache_root()
    base = current_base(root)
    wanted = construct.normalise(request)
    mode = os.environ.get(ENV_INSTALLED)
    if mode:
        try:
            return _installed(wanted, base)
        except StackError:
            if mode != "first":
                raise
    key = _request_key(wanted, base)
    stack = _warm(root, key, wanted, base)
    if stack is None:
        _writable(root)
        with _locked(root, f"request-{key}", report):
            stack = _warm(root, key, wanted, base) or _cold(root, key, wanted, base, report)
    construct.stamp(root, stack.key)
    return replace(stack, seconds=time.perf_counter() - started)


def ready(request: Mapping[str, str]) -> Stack | None:
    """Returns the environment for ``request`` if already built, without a process or network."""
    root = cache_root()
    base = current_base(root)
    wanted = construct.normalise(request)
    mode = os.environ.get(ENV_INSTALLED)
    if mode:
        with contextlib.suppress(StackError):
            return _installed(wanted, base)
        if mode != "first":
            return None
    return _warm(root, _request_key(wanted, base), wanted, base)


def _installed(wanted: Mapping[str, str], base: Base) -> Stack:
    """Returns the base itself. Raises StackError if it does not fit the request."""
    from moediag.lab.stacks import in_place as installed

    empty = Stack(base.executable, {}, "installed", 0.0, [rank_path()], kind="installed")
    have = installed.distributions(base.executable, empty.environ())
    installed.check(wanted, have, ENV_INSTALLED)
    names = dict.fromkeys(("torch", "transformers", "accelerate", *wanted))
    return replace(
        empty,
        versions={"python": have["python"], **{n: have.get(n) for n in names if n != "python"}},
        notes=(f"ran on what is installed, no environment was built ({ENV_INSTALLED})",),
        resolution=tuple(f"{n}=={v}" for n, v in sorted(have.items()) if n != "python"),
    )


def _request_key(wanted: Mapping[str, str], base: Base) -> str:
    text = json.dumps([construct.FORMAT, wanted, base.identity], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _warm(root: Path, key: str, wanted: Mapping[str, str], base: Base) -> Stack | None:
    """Returns the stack if it is known and intact, without a process or network."""
    record = _read(root / "requests" / f"{key}.json")
    if record is None or _expired(record):
        return None
    environment = construct.intact(root, str(record["environment"]))
    return _stack(root, record, environment, wanted, base) if environment else None


def _cold(root: Path, key: str, wanted: Mapping[str, str], base: Base, progress: Progress) -> Stack:
    from moediag.lab.stacks.indexes import read_config

    path = root / "requests" / f"{key}.json"
    config = read_config()
    parts, lines = base.torch_parts() if base.torch else ((), ())
    record = _read(path)
    resolution = _known(record) if record and not _expired(record) else None
    if resolution is None:
        resolution = _resolve(wanted, base, config, progress, lines, record)
    name = construct.environment_key(resolution, wanted, base)
    with _locked(root, name, progress):
        environment = construct.intact(root, name)
        if environment is None:
            environment = construct.make(root, name, resolution, base, parts, config, progress)
    record = {
        "format": construct.FORMAT,
        "wanted": dict(wanted),
        "resolution": {
            **dataclasses.asdict(resolution),
            "cutoff": resolution.cutoff.isoformat() if resolution.cutoff else None,
        },
        "environment": name,
        "made": time.time(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    progress(f"{name} is ready", 1.0)
    return _stack(root, record, environment, wanted, base)


def _resolve(
    wanted: Mapping[str, str],
    base: Base,
    config: Any,
    progress: Progress,
    lines: tuple[str, ...],
    old: dict[str, Any] | None,
) -> Resolution:
    from moediag.lab.stacks import offline, resolve
    from moediag.lab.stacks.uv import Unsatisfiable

    if config.bundle is not None:
        locked = offline.locked(config.bundle, wanted, base)
        if locked is not None:
            return locked
    try:
        return resolve.resolve(wanted, base, config, progress, lines)
    except NoSuchRelease:
        raise
    except StackError as error:
        known = _known(old)
        if known is None or isinstance(error, Unsatisfiable):
            raise
        day = time.strftime("%Y-%m-%d", time.gmtime(float((old or {}).get("made", 0))))
        note = f"no index could be asked; the newest release is that of {day}"
        return replace(known, notes=(*known.notes, note))


def _known(record: dict[str, Any] | None) -> Resolution | None:
    from moediag.lab.stacks.resolve import Resolution

    if record is None:
        return None
    raw = dict(record["resolution"])
    raw["cutoff"] = datetime.fromisoformat(raw["cutoff"]) if raw["cutoff"] else None
    raw["pins"], raw["notes"] = tuple(raw["pins"]), tuple(raw["notes"])
    return Resolution(**raw)


def _stack(
    root: Path,
    record: dict[str, Any],
    environment: dict[str, Any],
    wanted: Mapping[str, str],
    base: Base,
) -> Stack:
    resolution = record["resolution"]
    folder = root / "envs" / record["environment"]
    installed = dict(pin.split("==", 1) for pin in resolution["pins"])
    if resolution["kind"] == "overlay":
        installed["torch"] = base.torch or ""
    names = dict.fromkeys(("torch", "transformers", "accelerate", *wanted))
    versions: dict[str, str | None] = {"python": environment["python"]}
    versions.update({n: installed.get(n) for n in names if n != "python"})
    cutoff = resolution["cutoff"]
    return Stack(
        python=folder / "bin" / "python",
        versions=versions,
        key=record["environment"],
        seconds=0.0,
        pythonpath=[rank_path()],
        cutoff=datetime.fromisoformat(cutoff) if cutoff else None,
        notes=tuple(resolution["notes"]),
        kind=resolution["kind"],
        resolution=tuple(resolution["pins"]),
        pycache=root / "pycache" if environment.get("frozen_torch") else None,
    )


def _expired(record: dict[str, Any]) -> bool:
    return bool(record["resolution"]["moving"]) and time.time() - record["made"] > NEWEST_VALID


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    usable = isinstance(record, dict) and record.get("format") == construct.FORMAT
    return record if usable else None


def _writable(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NoEnvironments(
            f"the cache folder cannot be made: {error}",
            f"Set {ENV_CACHE} to a folder that can be written.",
        ) from error


@contextlib.contextmanager
def _locked(root: Path, name: str, progress: Progress) -> Iterator[None]:
    """Holds a lock between moediag processes; the system releases it if a process dies."""
    import filelock

    folder = root / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        progress("waiting: another moediag is building this environment", None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
