"""A folder from which moediag and its stacks install on a machine without a network.

It holds wheels for one Python and platform, the exact resolution of each stack
(``stacks.json``), an install script and a README. Torch is not in it: overlays use the
machine's own.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.metadata
import json
import platform as platform_module
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from packaging import tags
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from moediag.errors import NoEnvironments, StackError, UsageError
from moediag.protocol import write_json
from moediag.stacks import index_pages, releases, resolve, uv
from moediag.stacks.base import Base, cache_root, current_base
from moediag.stacks.construct import normalise
from moediag.stacks.indexes import IndexConfig, read_config
from moediag.stacks.resolve import Resolution, Target

if TYPE_CHECKING:
    from moediag.stacks.resolve import Progress

MANIFEST = "stacks.json"
GLIBC = 28  # 2.28: manylinux tags up to this one (RHEL 8, Debian 10 and newer)


@dataclass(frozen=True, slots=True)
class Bundle:
    """``wheels``: file names; ``size`` in bytes."""

    folder: Path
    python: str
    platform: str
    wheels: tuple[str, ...]
    size: int


def make_bundle(
    requests: Sequence[Mapping[str, str]],
    python_version: str,
    out: Path,
    progress: Progress | None = None,
    platform: str | None = None,
) -> Bundle:
    """Fills ``out``. ``platform``: ``x86_64`` or ``aarch64`` (default: this machine's), Linux.

    Raises StackError (no network, no wheel for that Python) and UsageError.
    """
    report: Progress = progress or (lambda _text, _fraction: None)
    if not re.fullmatch(r"3\.\d+", python_version):
        raise UsageError(f"--python-version {python_version}: write it like 3.12")
    arch = platform or platform_module.machine()
    target = Target(python_version, f"{arch}-manylinux_2_{GLIBC}")
    config, base = read_config(), current_base(cache_root())
    lines = base.torch_parts()[1] if base.torch else ()
    resolutions = []
    for request in requests:
        wanted = normalise(request)
        if {"torch", "python"} & set(wanted):
            raise UsageError(
                "a stack for another machine uses that machine's torch and --python-version",
                "Leave torch and python out of the stack.",
            )
        resolved = resolve.resolve(wanted, base, config, report, lines, target)
        resolutions.append((wanted, resolved))
    wheels = out / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    pins = {pin for _, resolution in resolutions for pin in resolution.pins}
    pins |= set(_own_requirements(target, config))
    for done, pin in enumerate(sorted(pins)):
        report(f"fetching {pin}", 0.2 + 0.75 * done / len(pins))
        _fetch_wheel(pin, target, wheels, config)
    report("packing moediag itself", 0.96)
    _own_wheel(wheels, config)
    _write_guides(out, target, resolutions)
    names = tuple(sorted(path.name for path in wheels.glob("*.whl")))
    report(f"{len(names)} wheels in {wheels}", 1.0)
    size = sum((wheels / name).stat().st_size for name in names)
    return Bundle(out, python_version, target.platform, names, size)


def locked(folder: Path, wanted: Mapping[str, str], base: Base) -> Resolution | None:
    """What the bundle in ``folder`` says about this request; None where it has no word on it
    (a plain folder of wheels has none). Raises StackError for a bundle of another Python."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StackError(f"{folder / MANIFEST} cannot be read: {error}") from error
    if not (base.python + ".").startswith(manifest["python"] + "."):
        raise StackError(
            f"the wheels in {folder} are for Python {manifest['python']}, this is {base.python}",
            "Build the folder again with `moediag stacks build --python-version "
            f"{'.'.join(base.python.split('.')[:2])} --out DIR STACK`.",
        )
    for entry in manifest["stacks"]:
        if entry["wanted"] == dict(wanted):
            raw = dict(entry["resolution"])
            raw["cutoff"] = datetime.fromisoformat(raw["cutoff"]) if raw["cutoff"] else None
            raw["pins"], raw["notes"] = tuple(raw["pins"]), tuple(raw["notes"])
            return Resolution(**raw)
    return None


def wheel_tags(target: Target) -> list[tags.Tag]:
    """What that Python on that platform installs, best first."""
    arch = target.platform.partition("-")[0]
    platforms = []
    for minor in range(GLIBC, 4, -1):
        platforms.append(f"manylinux_2_{minor}_{arch}")
        old = {17: "2014", 12: "2010", 5: "1"}.get(minor)
        if old:
            platforms.append(f"manylinux{old}_{arch}")
    platforms.append(f"linux_{arch}")
    version = tuple(int(part) for part in target.python.split("."))
    interpreter = "cp" + target.python.replace(".", "")
    found = list(tags.cpython_tags(version, abis=[interpreter], platforms=platforms))
    return found + list(tags.compatible_tags(version, interpreter, platforms))


def _own_requirements(target: Target, config: IndexConfig) -> tuple[str, ...]:
    """Everything moediag itself needs there, torch left out."""
    lines = importlib.metadata.requires("moediag") or []
    wanted = [line for line in lines if "extra ==" not in line and not line.startswith("torch")]
    ground = ["--python-version", target.python, "--python-platform", target.platform]
    return resolve.compile_pins([*wanted, "pip"], ground, True, config) or ()


def _fetch_wheel(pin: str, target: Target, wheels: Path, config: IndexConfig) -> None:
    """The best wheel of ``pin`` for ``target`` into ``wheels``, checked against its hash."""
    name, version = pin.split("==")
    order = {tag: place for place, tag in enumerate(wheel_tags(target))}
    files = [
        f for f in releases.files(name, config).files if Version(f.version) == Version(version)
    ]
    best: tuple[int, index_pages.IndexFile] | None = None
    for file in files:
        if file.name.endswith(".whl"):
            places = [order[t] for t in parse_wheel_filename(file.name)[3] if t in order]
            if places and (best is None or min(places) < best[0]):
                best = (min(places), file)
    if best is not None:
        _download(best[1], wheels, config)
        return
    sources = [f for f in files if not f.name.endswith(".whl")]
    if not sources:
        raise StackError(f"{pin} has no wheel for Python {target.python} on {target.platform}")
    with tempfile.TemporaryDirectory(prefix="moediag-") as scratch:
        source = _download(sources[0], Path(scratch), config)
        arguments = ["build", "--wheel", "--out-dir", scratch, str(source)]
        uv.run([*arguments, *config.uv_arguments()], config, Path(scratch), what=f"building {pin}")
        built = next(Path(scratch).glob("*.whl"))
        if not any(tag in order for tag in parse_wheel_filename(built.name)[3]):
            raise StackError(
                f"{pin} has only a source archive, and what it builds here ({built.name}) does "
                f"not fit Python {target.python} on {target.platform}",
                f"Run `moediag stacks build` with Python {target.python}, on such a machine.",
            )
        shutil.move(built, wheels / built.name)


def _download(file: index_pages.IndexFile, folder: Path, config: IndexConfig) -> Path:
    path = folder / file.name
    local = index_pages.local_path(file.url)
    if local is not None:
        body = local.read_bytes()
    elif path.exists() and file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest():
        return path
    else:
        try:
            answer = index_pages.fetch(file.url, config)
        except index_pages.Unreachable as error:
            raise NoEnvironments(f"no network: {error}", releases.NO_NETWORK_HELP) from error
        if answer is None:
            raise StackError(f"{file.name} is listed by the index but not there")
        body = answer[0]
    if file.sha256 and hashlib.sha256(body).hexdigest() != file.sha256:
        raise StackError(f"{file.name} does not have the hash that the index gives")
    path.write_bytes(body)
    return path


def _own_wheel(wheels: Path, config: IndexConfig) -> None:
    """moediag as it runs now: built from its checkout, or packed again as installed."""
    checkout = Path(__file__).resolve().parents[2]
    for old in wheels.glob("moediag-*.whl"):
        old.unlink()
    if (checkout / "pyproject.toml").is_file():
        arguments = ["build", "--wheel", "--out-dir", str(wheels.resolve()), str(checkout)]
        with tempfile.TemporaryDirectory(prefix="moediag-") as scratch:
            uv.run(
                [*arguments, *config.uv_arguments()], config, Path(scratch), what="packing moediag"
            )
        (wheels / ".gitignore").unlink(missing_ok=True)
        return
    repack(importlib.metadata.distribution("moediag"), wheels)


def repack(distribution: importlib.metadata.Distribution, folder: Path) -> Path:
    """A wheel made of an installed pure-Python distribution; returns its path."""
    name = re.sub(r"[-_.]+", "_", distribution.metadata["Name"])
    path = folder / f"{name}-{distribution.version}-py3-none-any.whl"
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, inside in _installed_files(distribution):
            body = file.read_bytes()
            wheel.writestr(inside, body)
            digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
            record.append(f"{inside},sha256={digest},{len(body)}")
        inside = f"{name}-{distribution.version}.dist-info/RECORD"
        wheel.writestr(inside, "\n".join([*record, f"{inside},,"]) + "\n")
    return path


def _installed_files(
    distribution: importlib.metadata.Distribution,
) -> Iterator[tuple[Path, str]]:
    skipped = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
    for file in distribution.files or ():
        top, last = file.parts[0], file.parts[-1]
        path = Path(str(file.locate()))
        if top == ".." or "__pycache__" in file.parts or last in skipped or not path.is_file():
            continue
        yield path, file.as_posix()


def _write_guides(
    out: Path, target: Target, resolutions: Sequence[tuple[dict[str, str], Resolution]]
) -> None:
    stacks = []
    for wanted, resolution in resolutions:
        raw = dataclasses.asdict(resolution)
        raw["cutoff"] = resolution.cutoff.isoformat() if resolution.cutoff else None
        stacks.append({"wanted": wanted, "resolution": {**raw, "moving": False}})
        label = "-".join(f"{n}-{resolution.installed.get(n, v)}" for n, v in wanted.items())
        lines = "\n".join(resolution.pins) + "\n"
        (out / f"requirements-{label}.txt").write_text(lines, encoding="utf-8")
    manifest = {
        "python": target.python,
        "platform": target.platform,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "made_with_python": ".".join(map(str, sys.version_info[:3])),
        "stacks": stacks,
    }
    (out / "install.sh").write_text(_INSTALL.format(python=target.python), encoding="utf-8")
    guide = _README.format(python=target.python, platform=target.platform)
    (out / "README.md").write_text(guide, encoding="utf-8")
    write_json(out / MANIFEST, manifest)


_INSTALL = """\
#!/bin/sh
# Installs moediag without a network:  sh install.sh [PYTHON]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${{1:-python3}}
"$python" - <<'CHECK'
import importlib.metadata, sys
if "%d.%d" % sys.version_info[:2] != "{python}":
    sys.exit("these wheels are for Python {python}, this is %d.%d" % sys.version_info[:2])
try:
    importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit("this Python has no torch; name one that has:  sh install.sh /path/to/python")
CHECK
if ! "$python" -m pip --version >/dev/null 2>&1; then
    pip=$(ls "$here"/wheels/pip-*.whl)
    set -- "$python" "$pip/pip"
else
    set -- "$python" -m pip
fi
"$@" install --no-index --find-links "$here/wheels" moediag
echo "Now type:  export MOEDIAG_WHEELS=$here"
"""

_README = """\
# moediag without a network

For Python {python} on {platform}, with torch already installed in that Python.

    sh install.sh python3            # the Python that has torch
    export MOEDIAG_WHEELS=$PWD       # where moediag finds the wheels of its stacks
    moediag doctor
    moediag run expert-starvation

`stacks.json` lists the stacks that this folder holds, `requirements-*.txt` what each consists of.
"""
