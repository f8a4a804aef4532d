"""The content of the wheel (the package with its catalogue and templates, the licence, and nothing
else) and of the sdist (what builds and tests it), and what their metadata say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email import message_from_bytes
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import moediag
from moediag.errors import NoEnvironments
from moediag.lab import registered
from moediag.lab.stacks import uv
from moediag.lab.stacks.indexes import read_config

ROOT = Path(__file__).parents[2]
CONFIG = read_config()
HEAVY = {"uv", "py-spy"}  # binaries that listing scenarios does not need


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"), "wheel")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The paths within the sdist, without its folder."""
    with tarfile.open(build(tmp_path_factory.mktemp("dist"), "sdist")) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def build(out: Path, kind: str) -> Path:
    """Builds a package in ``out`` and returns its file."""
    if find_spec("hatchling") is not None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    else:
        command = [str(uv.find_uv()), "build", f"--{kind}", "-q", "--out-dir", str(out), str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode and find_spec("hatchling") is None:
        pytest.skip(f"hatchling is not installed and cannot be fetched: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("moediag-*")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> dict[str, bytes]:
    """Path within the wheel -> bytes."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def python(names: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with what the job tool needs except large binaries."""
    folder = tmp_path_factory.mktemp("environment")
    metadata = names[f"moediag-{moediag.__version__}.dist-info/METADATA"]
    python = folder / "venv" / "bin" / "python"
    run_uv("venv", "-q", "--python", sys.executable, folder / "venv")
    install(python, requirements(metadata, extra=""))
    return python


def requirements(metadata: bytes, extra: str) -> list[str]:
    """The light requirements of the wheel with this extra, without other extras of its own."""
    found = map(Requirement, message_from_bytes(metadata).get_all("Requires-Dist", []))
    return [
        f"{one.name}{one.specifier}"
        for one in found
        if one.name not in {*HEAVY, "moediag"}
        and (one.marker is None or one.marker.evaluate({"extra": extra}))
    ]


def install(python: Path, needed: list[str]) -> None:
    try:
        run_uv("pip", "install", "-q", "--python", python, *CONFIG.uv_arguments(), *needed)
    except NoEnvironments as error:
        pytest.skip(f"the light dependencies cannot be fetched: {error}")


def moediag_of(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the environment's own command."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        [python.with_name("moediag"), *words], cwd=python.parent, env=environment,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def run_uv(*arguments: str | Path) -> None:
    uv.run(arguments, CONFIG, Path(tempfile.gettempdir()))


def listed(python: Path) -> list[str]:
    """The names that `moediag list --json` prints."""
    done = moediag_of(python, "list", "--json")
    assert done.returncode == 0, done.stderr
    return [scenario["name"] for scenario in json.loads(done.stdout)["scenarios"]]


def test_the_job_tool_needs_nothing_of_the_laboratory(python: Path, wheel: Path) -> None:
    run_uv("pip", "install", "-q", "--no-deps", "--python", python, wheel)
    absent = "from importlib.util import find_spec; assert find_spec('pydantic') is None"
    subprocess.run([python, "-I", "-c", absent], check=True)
    for words, code in (
        (["diagnose", str(ROOT / "tests" / "samples" / "flight-recorder")], 3),
        (["report", str(ROOT / "tests" / "golden" / "results" / "hang.json")], 0),
        (["explain", "hang"], 0),
        (["env"], 0),
        (["run", "--help"], 0),
    ):
        done = moediag_of(python, *words)
        assert (done.returncode, done.stderr) == (code, ""), words
    refused = moediag_of(python, "run", "expert-starvation")
    assert (refused.returncode, refused.stdout) == (4, "")
    assert refused.stderr.startswith("error: `moediag run` needs the package pydantic, which is")
    assert "pip install 'moediag[run]'" in refused.stderr
    checks = json.loads(moediag_of(python, "doctor", "--json").stdout)["checks"]
    (told,) = [check for check in checks if check["name"] == "laboratory"]
    assert told["status"] == "warn" and "moediag[run]" in told["advice"]


def test_a_wheel_and_an_editable_install_list_every_scenario(
    python: Path, wheel: Path, names: dict[str, bytes]
) -> None:
    metadata = names[f"moediag-{moediag.__version__}.dist-info/METADATA"]
    install(python, requirements(metadata, extra="lab"))
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
    shipped = {n for n in names if n.startswith("moediag/scenarios/")}
    here = {
        f"moediag/{path.relative_to(ROOT)}": path
        for kind in ("*.yaml", "*.py")
        for path in (ROOT / "scenarios").rglob(kind)
    }
    assert shipped == set(here) and len(here) >= 7
    assert "moediag/scenarios/programs/router_block/plans.py" in here
    for name, path in here.items():
        assert names[name] == path.read_bytes()


def test_every_module_and_template_is_in_the_wheel(names: dict[str, bytes]) -> None:
    here = {
        str(path.relative_to(ROOT))
        for kind in ("*.py", "*.j2", "*.yaml", "*.sh", "*.typed")
        for path in (ROOT / "moediag").rglob(kind)
    }
    assert here <= set(names)
    for page in ("base", "page", "answer", "table"):
        assert f"moediag/report/{page}.html.j2" in names


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
    ours = {name for name in names if name != "moediag/pytest_plugin.py"}
    assert not [name for name in ours if name.endswith(".pyc") or "test" in name]


def test_the_package_is_typed_and_described_for_an_index(names: dict[str, bytes]) -> None:
    assert "moediag/py.typed" in names
    metadata = message_from_bytes(names[f"moediag-{moediag.__version__}.dist-info/METADATA"])
    assert metadata["Author"] == "The moediag developers"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)} <= set(
        metadata.get_all("Classifier", [])
    )
    labels = {line.partition(",")[0] for line in metadata.get_all("Project-URL", [])}
    assert labels == {"Homepage", "Documentation", "Issues", "Changelog"}


def test_the_ranks_libraries_are_an_extra(names: dict[str, bytes]) -> None:
    metadata = message_from_bytes(names[f"moediag-{moediag.__version__}.dist-info/METADATA"])
    needed = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    always = {r.name for r in needed if r.marker is None or "extra" not in str(r.marker)}
    assert always == {"typer", "rich", "jinja2", "psutil", "py-spy", "tomli"}
    lab, run = (
        {r.name for r in needed if r.marker is not None and f'extra == "{extra}"' in str(r.marker)}
        for extra in ("lab", "run")
    )
    assert run == lab | {"torch", "transformers", "accelerate"}
    assert lab >= set(registered.NEEDED) - {"ruamel", "pypi_simple"}
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "lab", "run", "notify", "native", "deepspeed", "ray", "slurm", "docs", "dev",
    }  # fmt: skip


def test_the_long_description_has_no_relative_link(names: dict[str, bytes]) -> None:
    metadata = message_from_bytes(names[f"moediag-{moediag.__version__}.dist-info/METADATA"])
    links = re.findall(r"\]\(([^)\s]+)\)", str(metadata.get_payload()))
    assert links and [link for link in links if not link.startswith("https://")] == []


def test_the_sdist_has_what_builds_and_tests_it(source: set[str]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a checkout")
    kept = {line for line in listed.stdout.splitlines() if (ROOT / line).is_file()}
    assert kept <= source
    assert {name for name in source if "/" not in name and name} - kept <= {"PKG-INFO"}
    assert not [name for name in source if name.endswith((".pyc", ".log")) and name not in kept]
