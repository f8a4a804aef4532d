"""The content of the wheel: the package with its catalogue and templates, the licence, and nothing
else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_bytes
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import moediag
from moediag.errors import NoEnvironments
from moediag.stacks import uv
from moediag.stacks.indexes import read_config

ROOT = Path(__file__).parents[2]
CONFIG = read_config()
# Not needed to list scenarios; torch is gigabytes, the other two are binaries.
HEAVY = {"torch", "uv", "py-spy"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    if find_spec("hatchling") is not None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    else:
        command = [str(uv.find_uv()), "build", "--wheel", "-q", "--out-dir", str(out), str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode and find_spec("hatchling") is None:
        pytest.skip(f"hatchling is not installed and cannot be fetched: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("moediag-*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> dict[str, bytes]:
    """Path within the wheel -> bytes."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def python(names: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel's dependencies except the large ones."""
    folder = tmp_path_factory.mktemp("environment")
    metadata = names[f"moediag-{moediag.__version__}.dist-info/METADATA"]
    needed = [
        str(requirement)
        for text in message_from_bytes(metadata).get_all("Requires-Dist", [])
        if (requirement := Requirement(text)).name not in HEAVY
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]
    try:
        run_uv("venv", "-q", "--python", sys.executable, folder / "venv")
        python = folder / "venv" / "bin" / "python"
        run_uv("pip", "install", "-q", "--python", python, *CONFIG.uv_arguments(), *needed)
    except NoEnvironments as error:
        pytest.skip(f"the light dependencies cannot be fetched: {error}")
    return python


def run_uv(*arguments: str | Path) -> None:
    uv.run(arguments, CONFIG, Path(tempfile.gettempdir()))


def listed(python: Path) -> list[str]:
    """The names that `moediag list --json` prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [python.with_name("moediag"), "list", "--json"], cwd=python.parent, env=environment,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [scenario["name"] for scenario in json.loads(done.stdout)["scenarios"]]


def test_a_wheel_and_an_editable_install_list_every_scenario(python: Path, wheel: Path) -> None:
    here = sorted(path.stem for path in (ROOT / "scenarios").glob("*.yaml"))
    into = ("pip", "install", "-q", "--no-deps", "--python", python)
    run_uv(*into, wheel)
    absent = "from importlib.util import find_spec; assert find_spec('torch') is None"
    subprocess.run([python, "-I", "-c", absent], check=True)
    assert listed(python) == here
    try:
        run_uv(*into, *CONFIG.uv_arguments(), "--reinstall", "-e", ROOT)
    except NoEnvironments as error:
        pytest.skip(f"hatchling cannot be fetched: {error}")
    found = subprocess.run(
        [python, "-I", "-c", "import moediag; print(moediag.__file__)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(found.stdout.strip()) == ROOT / "moediag" / "__init__.py"
    assert listed(python) == here


def test_the_wheel_has_the_catalogue_unchanged(names: dict[str, bytes]) -> None:
    shipped = {n.rpartition("/")[2] for n in names if n.startswith("moediag/scenarios/")}
    here = {path.name: path for path in (ROOT / "scenarios").glob("*.yaml")}
    assert shipped == set(here) and len(here) >= 7
    for name, path in here.items():
        assert names[f"moediag/scenarios/{name}"] == path.read_bytes()


def test_every_module_and_template_is_in_the_wheel(names: dict[str, bytes]) -> None:
    here = {
        str(path.relative_to(ROOT))
        for kind in ("*.py", "*.j2", "*.yaml", "*.sh", "*.typed")
        for path in (ROOT / "moediag").rglob(kind)
    }
    assert here <= set(names)
    assert "moediag/report/page.html.j2" in names


def test_the_licence_and_the_command_are_in_the_wheel(names: dict[str, bytes]) -> None:
    info = f"moediag-{moediag.__version__}.dist-info"
    assert names[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    metadata = names[f"{info}/METADATA"].decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert b"moediag = moediag.cli:main" in names[f"{info}/entry_points.txt"]


def test_nothing_else_is_in_the_wheel(names: dict[str, bytes]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert tops == {"moediag", f"moediag-{moediag.__version__}.dist-info"}
    assert not [name for name in names if name.endswith(".pyc") or "test" in name]
