"""Resolves a request ("transformers 4.53.2") to the exact release of every package.

Packages that the request does not pin are resolved as of the upload day of its newest pinned
release: users of an old release did not have today's versions of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path

from packaging.version import Version

from moediag.errors import StackError
from moediag.lab.stacks import releases, uv
from moediag.lab.stacks.base import NEWEST, Base
from moediag.lab.stacks.indexes import IndexConfig
from moediag.lab.stacks.uv import Unsatisfiable
from moediag.records import dataclass

Progress = Callable[[str, "float | None"], None]

NO_TORCH = 'torch ; python_version < "0"'  # as an override: uv never resolves torch


@dataclass(frozen=True, slots=True)
class Target:
    """Another machine. It has its own torch, so only overlays can be resolved for it."""

    python: str  # like "3.12"
    platform: str  # uv's name


@dataclass(frozen=True, slots=True)
class Resolution:
    """The exact releases for a request."""

    kind: str  # ``overlay`` on the base's torch, or ``full`` with its own torch (and Python)
    pins: tuple[str, ...]  # ``name==version`` of everything to install, sorted
    python: str | None = None
    cutoff: datetime | None = None  # only earlier uploads were considered
    notes: tuple[str, ...] = ()
    moving: bool = False  # the request names a newest release, so the result will expire

    @property
    def installed(self) -> dict[str, str]:
        return dict(pin.split("==", 1) for pin in self.pins)


def kind_of(wanted: Mapping[str, str], base: Base) -> str:
    """Returns ``overlay`` if the base has the requested Python and torch, else ``full``."""
    python = wanted.get("python")
    if python and not (base.python + ".").startswith(python + "."):
        return "full"
    torch = wanted.get("torch")
    if torch is None and base.torch is not None:
        return "overlay"
    if base.torch is None:
        if torch is None:
            raise StackError(
                f"{base.executable} has no torch to build on",
                "Install it there: `python -m pip install 'moediag[run]'`, on the CPU after "
                "`python -m pip install torch --index-url https://download.pytorch.org/whl/cpu`. "
                "Or name a release: --stack torch=VERSION",
            )
        return "full"
    have = Version(base.torch)
    same = torch == str(have) or torch == have.public
    return "overlay" if same else "full"


def resolve(
    wanted: Mapping[str, str],
    base: Base,
    config: IndexConfig,
    progress: Progress,
    lines: tuple[str, ...] = (),
    target: Target | None = None,
) -> Resolution:
    """Resolves ``wanted`` with the indexes and uv. ``lines`` are the requirements of the base's
    torch, which constrain an overlay; a full environment has another torch.

    Raises StackError (no network, nothing fits) and NoSuchRelease.
    """
    kind = "overlay" if target else kind_of(wanted, base)
    lines = lines if kind == "overlay" else ()
    python = wanted.get("python") if kind == "full" else None
    running = target.python if target else python or base.python
    pins, notes, cutoff = _pinned(wanted, kind, running, base, config, progress)
    requirements = [f"{name}=={version}" if version else name for name, version in pins.items()]
    if "transformers" in pins and "accelerate" not in pins:
        requirements.append("accelerate")
    if "transformers" not in pins and "torchtitan" not in pins:
        requirements += ["transformers", "accelerate"]
    progress("choosing the release of every package", 0.1)
    ground = _ground(python, base, target)
    answer = compile_pins(requirements, ground, kind == "overlay", config, cutoff, lines)
    if answer is None:
        assert cutoff is not None
        notes.append(
            f"nothing fits with packages uploaded before {cutoff:%Y-%m-%d} only; "
            "companions are today's newest"
        )
        cutoff = None
        answer = compile_pins(requirements, ground, kind == "overlay", config, None, lines) or ()
    moving = any(value == NEWEST for value in wanted.values())
    return Resolution(kind, answer, python, cutoff, tuple(notes), moving)


def cutoff_of(moments: list[datetime]) -> datetime:
    """Returns midnight (UTC) after the last of ``moments``.

    uv accepts only files uploaded strictly before the cut-off, and uploading a release takes
    seconds to hours: the exact upload time would exclude the release itself.
    """
    day = max(moments).astimezone(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    return day + timedelta(days=1)


def _pinned(
    wanted: Mapping[str, str],
    kind: str,
    python: str,
    base: Base,
    config: IndexConfig,
    progress: Progress,
) -> tuple[dict[str, str], list[str], datetime | None]:
    """Returns the exact versions of requested packages, notes, and the cut-off for the rest."""
    pins: dict[str, str] = {}
    notes: list[str] = []
    moments: list[datetime] = []
    undated: list[str] = []
    names = [n for n in wanted if n != "python" and not (n == "torch" and kind == "overlay")]
    if kind == "full" and "torch" not in names and base.torch is not None:
        names.append("torch")
    full = python if python.count(".") >= 2 else f"{python}.99"
    for name in names:
        progress(f"looking up {name} {wanted.get(name, '')}".rstrip(), 0.02)
        version = wanted.get(name, NEWEST)
        if name == "torch" and name not in wanted and base.torch:
            version = Version(base.torch).public
        if version == NEWEST:
            release = releases.newest(name, full, config)
        else:
            release = releases.find(name, version, config)
        if not releases.supports(release, full):
            raise StackError(
                f"{name} {release.version} needs Python {release.requires_python}, "
                f"this stack has {python}",
                "Ask for another Python: --stack python=VERSION",
            )
        if release.yanked:
            reason = f": {release.yanked_reason}" if release.yanked_reason else ""
            notes.append(f"{name} {release.version} was withdrawn (yanked){reason}")
        pins[name] = version or release.version
        if release.settled:
            moments.append(release.settled)
        else:
            undated.append(f"{name} {release.version}")
    if undated and not config.offline:
        notes.append(
            f"no index says when {', '.join(undated)} was uploaded, so the companions are "
            "today's newest"
        )
    return pins, notes, cutoff_of(moments) if moments and not undated else None


def _ground(python: str | None, base: Base, target: Target | None) -> list[str]:
    """Returns uv's arguments for the Python and platform."""
    if target is not None:
        return ["--python-version", target.python, "--python-platform", target.platform]
    return ["--python-version", python] if python else ["--python", str(base.executable)]


def compile_pins(
    requirements: list[str],
    ground: list[str],
    without_torch: bool,
    config: IndexConfig,
    cutoff: datetime | None = None,
    lines: tuple[str, ...] = (),
) -> tuple[str, ...] | None:
    """Returns ``name==version`` of all that ``requirements`` need, sorted. ``lines``: constraints.

    Returns None if nothing fits with a cut-off. Raises StackError.
    """
    with tempfile.TemporaryDirectory(prefix="moediag-") as name:
        folder = Path(name)
        (folder / "requirements.in").write_text("\n".join(requirements) + "\n", encoding="utf-8")
        (folder / "constraints.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        arguments = ["pip", "compile", "requirements.in", "--no-header", "--no-annotate"]
        arguments += ["--constraint", "constraints.txt", *ground, *config.uv_arguments()]
        if without_torch:
            (folder / "overrides.txt").write_text(NO_TORCH + "\n", encoding="utf-8")
            arguments += ["--override", "overrides.txt"]
        if cutoff:
            arguments += ["--exclude-newer", cutoff.strftime("%Y-%m-%dT%H:%M:%SZ")]
        if cutoff and not without_torch:
            # Indexes of CPU wheels have no upload dates, so uv would exclude their files.
            arguments += ["--exclude-newer-package", "torch=false"]
        try:
            output = uv.run(arguments, config, folder, what="resolving " + ", ".join(requirements))
        except Unsatisfiable:
            if cutoff is None:
                raise
            return None
    found = (line.split(";")[0].strip() for line in output.splitlines())
    return tuple(sorted(pin for pin in found if "==" in pin))
