"""What ships: the wheel holds the package with its catalogue and templates, the licence, and
nothing that a user does not need."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import moediag
from moediag.stacks import uv

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Path within the wheel -> bytes."""
    out = tmp_path_factory.mktemp("dist")
    if find_spec("hatchling") is not None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    else:
        command = [str(uv.find_uv()), "build", "--wheel", "-q", "--out-dir", str(out), str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode and find_spec("hatchling") is None:
        pytest.skip(f"hatchling is not installed and cannot be fetched: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("moediag-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_catalogue_ships_as_it_is(names: dict[str, bytes]) -> None:
    shipped = {n.rpartition("/")[2] for n in names if n.startswith("moediag/scenarios/")}
    here = {path.name: path for path in (ROOT / "scenarios").glob("*.yaml")}
    assert shipped == set(here) and len(here) >= 7
    for name, path in here.items():
        assert names[f"moediag/scenarios/{name}"] == path.read_bytes()


def test_every_module_and_template_of_the_package_ships(names: dict[str, bytes]) -> None:
    here = {
        str(path.relative_to(ROOT))
        for kind in ("*.py", "*.j2", "*.yaml", "*.sh", "*.typed")
        for path in (ROOT / "moediag").rglob(kind)
    }
    assert here <= set(names)
    assert "moediag/report/page.html.j2" in names


def test_the_licence_and_the_command_ship(names: dict[str, bytes]) -> None:
    info = f"moediag-{moediag.__version__}.dist-info"
    assert names[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    metadata = names[f"{info}/METADATA"].decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert b"moediag = moediag.cli:main" in names[f"{info}/entry_points.txt"]


def test_nothing_else_ships(names: dict[str, bytes]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert tops == {"moediag", f"moediag-{moediag.__version__}.dist-info"}
    assert not [name for name in names if name.endswith(".pyc") or "test" in name]
