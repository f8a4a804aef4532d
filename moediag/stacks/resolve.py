"""From a request ("transformers 4.53.2") to the exact release of every package.

What a request leaves open is resolved as of the day its newest pinned release was uploaded:
today's companions of an old release are not those its users had.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from packaging.version import Version

from moediag.errors import StackError
from moediag.stacks import releases, uv
from moediag.stacks.base import NEWEST, Base
from moediag.stacks.indexes import IndexConfig
from moediag.stacks.uv import Unsatisfiable

Progress = Callable[[str, "float | None"], None]

# in a request: the newest release
NO_TORCH = 'torch ; python_version < "0"'  # as an override: uv never resolves torch


@dataclass(frozen=True, slots=True)
class Target:
    """Another machine: ``python`` like "3.12", ``platform`` as uv names it. Its torch is its own,
    so only overlays can be resolved for it."""

    python: str
    platform: str


@dataclass(frozen=True, slots=True)
class Resolution:
    """``pins``: ``name==version`` of everything to install, sorted. ``kind``: ``overlay`` on the
    base's torch, or ``full`` with a torch (and perhaps a Python) of its own. ``cutoff``: releases
    uploaded at or after it were not considered. ``moving``: the request asks for a newest
    release, so the answer is not for ever."""

    kind: str
    pins: tuple[str, ...]
    python: str | None = None
    cutoff: datetime | None = None
    notes: tuple[str, ...] = ()
    moving: bool = False

    @property
    def installed(self) -> dict[str, str]:
        return dict(pin.split("==", 1) for pin in self.pins)


def kind_of(wanted: Mapping[str, str], base: Base) -> str:
    """``overlay`` when the base's Python and torch are the ones asked for, else ``full``."""
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
                "Install it there (CPU: `python -m pip install torch --index-url "
                "https://download.pytorch.org/whl/cpu`), or name one: --stack torch=VERSION",
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
    """Asks the indexes and uv. ``lines``: the base torch's own requirements, which companions of
    an overlay must meet; a full environment has another torch with requirements of its own.

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
    """Midnight (UTC) after the last of ``moments``.

    uv takes only files uploaded strictly before the cut-off, and a release's files are
    uploaded over seconds to hours: the exact upload time would exclude the release itself.
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
    """Exact versions of what the request names, notes on them, and the cut-off for the rest."""
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
    """uv's arguments for the Python and platform to resolve for."""
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
    """``name==version`` of all that ``requirements`` need, sorted; ``lines``: constraints.

    None where nothing fits and a cut-off may be why. Raises StackError.
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
            # Indexes of CPU wheels give no dates; without this they would not count.
            arguments += ["--exclude-newer-package", "torch=false"]
        try:
            output = uv.run(arguments, config, folder, what="resolving " + ", ".join(requirements))
        except Unsatisfiable:
            if cutoff is None:
                raise
            return None
    found = (line.split(";")[0].strip() for line in output.splitlines())
    return tuple(sorted(pin for pin in found if "==" in pin))
