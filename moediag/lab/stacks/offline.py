"""Makes a folder (bundle) that installs moediag and its stacks on a machine without a network.

It has wheels for one Python and platform, the exact resolution of each stack (``stacks.json``), an
install script and a README. It has no torch: overlays use the machine's own.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform as platform_module
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import moediag
from moediag.errors import NoEnvironments, StackError, UsageError
from moediag.lab.stacks import releases, resolve, uv
from moediag.lab.stacks.base import Base, cache_root, current_base
from moediag.lab.stacks.construct import normalise
from moediag.lab.stacks.indexes import IndexConfig, read_config
from moediag.lab.stacks.resolve import Resolution, Target
from moediag.protocol import write_json
from moediag.records import dataclass

if TYPE_CHECKING:
    from moediag.lab.stacks.resolve import Progress

MANIFEST = "stacks.json"
GLIBC = 28  # 2.28: manylinux tags up to this one (RHEL 8, Debian 10 and newer)
_OLD_NAMES = {17: "2014", 12: "2010", 5: "1"}  # of manylinux_2_17 and so on


@dataclass(frozen=True, slots=True)
class Bundle:
    """The created folder."""

    folder: Path
    python: str
    platform: str
    wheels: tuple[str, ...]  # file names
    size: int  # of all wheels, in bytes


def make_bundle(
    requests: Sequence[Mapping[str, str]],
    python_version: str,
    out: Path,
    progress: Progress | None = None,
    platform: str | None = None,
) -> Bundle:
    """Fills ``out`` for Linux. ``platform``: ``x86_64`` or ``aarch64``; default: this machine's.

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
    # One download each: two stacks may need different versions of one package.
    lists = [_own_requirements(target, config), *(r.pins for _, r in resolutions)]
    fetched: set[str] = set()
    for done, pins in enumerate(lists):
        new = set(pins) - fetched
        report(f"downloading {len(new)} wheels", 0.2 + 0.75 * done / len(lists))
        if new:
            _download(new, target, wheels, config)
        fetched |= new
    report("packing moediag itself", 0.96)
    _own_wheel(wheels, config)
    _write_guides(out, target, resolutions)
    names = tuple(sorted(path.name for path in wheels.glob("*.whl")))
    report(f"{len(names)} wheels in {wheels}", 1.0)
    size = sum((wheels / name).stat().st_size for name in names)
    return Bundle(out, python_version, target.platform, names, size)


def locked(folder: Path, wanted: Mapping[str, str], base: Base) -> Resolution | None:
    """Returns the bundle's resolution of this request; None in a plain folder of wheels.

    Raises StackError for a bundle of another Python.
    """
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


def platforms(arch: str) -> list[str]:
    """Returns the platform tags that the target machine accepts, best first."""
    found = []
    for minor in range(GLIBC, 4, -1):
        found.append(f"manylinux_2_{minor}_{arch}")
        if minor in _OLD_NAMES:
            found.append(f"manylinux{_OLD_NAMES[minor]}_{arch}")
    return [*found, f"linux_{arch}"]


def _own_requirements(target: Target, config: IndexConfig) -> tuple[str, ...]:
    """Returns the pins of moediag's own requirements on the target, which has a torch."""
    lines = importlib.metadata.requires("moediag") or []
    wanted = [line for line in lines if "extra ==" not in line]
    ground = ["--python-version", target.python, "--python-platform", target.platform]
    return resolve.compile_pins([*wanted, "pip"], ground, True, config) or ()


def _download(pins: Collection[str], target: Target, wheels: Path, config: IndexConfig) -> None:
    """Downloads the wheels of ``pins`` for ``target`` with pip; builds missing wheels here."""
    arch = target.platform.partition("-")[0]
    tag = "cp" + target.python.replace(".", "")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(wheels)]
    command += ["--python-version", target.python, "--implementation", "cp", "--abi", tag]
    for platform in platforms(arch):
        command += ["--platform", platform]
    command += [*config.pip_arguments(), *sorted(pins)]
    done = subprocess.run(
        command, env=config.pip_environment(os.environ), capture_output=True, text=True, check=False
    )
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-12:])
        raise NoEnvironments(f"pip cannot download the wheels\n{tail}", releases.NO_NETWORK_HELP)
    for source in [path for path in wheels.iterdir() if path.suffix != ".whl"]:
        _build(source, wheels, target, config)
        source.unlink()


def _build(source: Path, wheels: Path, target: Target, config: IndexConfig) -> None:
    with tempfile.TemporaryDirectory(prefix="moediag-") as scratch:
        arguments = ["build", "--wheel", "--out-dir", scratch, str(source.resolve())]
        what = f"building {source.name}"
        uv.run([*arguments, *config.uv_arguments()], config, Path(scratch), what=what)
        built = next(Path(scratch).glob("*.whl"))
        if not built.name.endswith("-none-any.whl"):
            raise StackError(
                f"{source.name} has no wheel for Python {target.python} on {target.platform}, and "
                f"what it builds here ({built.name}) runs on this machine only",
                f"Run `moediag stacks build` with Python {target.python}, on such a machine.",
            )
        shutil.move(built, wheels / built.name)


def _own_wheel(wheels: Path, config: IndexConfig) -> None:
    """Adds a wheel of the running moediag, from its checkout or its installed files."""
    checkout = Path(moediag.__file__).resolve().parents[1]
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
    """Makes a wheel from an installed pure-Python distribution; returns its path."""
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
