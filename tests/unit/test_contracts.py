"""The import contracts of pyproject.toml hold, and each of them can fail: one wrong import, written
into a copy of the package, breaks it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

tomllib = pytest.importorskip("tomllib", reason="tomllib reads pyproject.toml: Python 3.11")
pytest.importorskip("importlinter", reason="import-linter is not installed")

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS: list[dict[str, Any]] = CONFIG["tool"]["importlinter"]["contracts"]
ACYCLIC = "no cycles between the packages and modules of a package"


@dataclass(frozen=True)
class Wrong:
    """An import that one contract forbids."""

    file: str  # below moediag/
    line: str
    cycle: bool = False  # it closes a cycle too, so the contract on cycles breaks as well


# A new contract needs a line here, or `test_every_contract_has_a_wrong_import` fails.
WRONG = {
    "the job tool never imports the laboratory": Wrong(
        "cli/watch.py", "import moediag.lab.content", cycle=True
    ),
    "the job tool needs no package of the laboratory": Wrong("cli/watch.py", "import pydantic"),
    "the job tool is one pipeline: a package imports only what lies below it": Wrong(
        "recorder/log.py", "import moediag.laws", cycle=True
    ),
    "the laboratory: campaigns, then one run, then judgement and launchers, then what they need": (
        Wrong("lab/upstream/templates.py", "import moediag.lab.judgement.conclusion")
    ),
    "the step under test: tasks, then the training they share, then sharding, then models": Wrong(
        "lab/step/data.py", "import moediag.lab.step.collector", cycle=True
    ),
    ACYCLIC: Wrong("lab/scenario/schema.py", "import moediag.lab.scenario.plan"),
    "the control side never imports torch, the training libraries or the rank side": Wrong(
        "cli/watch.py", "import torch"
    ),
    "the rank side imports only the standard library, torch and the training libraries": Wrong(
        "lab/step/data.py", "import rich"
    ),
    "pure cores start no process and ask no network": Wrong(
        "lab/judgement/conclusion.py", "import subprocess"
    ),
    "diagnosis: facts, then who is to blame, then words, then rules": Wrong(
        "diagnosis/numbers/norms.py", "import moediag.diagnosis.end_states.failures"
    ),
    "rules: detectors read facts, and only the tuple knows the detectors": Wrong(
        "diagnosis/rules/failed.py", "import moediag.diagnosis.rules.hung"
    ),
    "others diagnose by moediag.diagnosis alone": Wrong(
        "pipeline/watch.py", "import moediag.diagnosis.numbers.norms"
    ),
    "others launch through moediag.launch's public modules": Wrong(
        "pipeline/watch.py", "import moediag.launch.follow.watchdog"
    ),
    "others read evidence through its readers, not file format by file format": Wrong(
        "pipeline/watch.py", "import moediag.evidence.exits"
    ),
    "how environments are built stays inside moediag.lab.stacks": Wrong(
        "lab/cli/run.py", "import moediag.lab.stacks.index_pages"
    ),
    "others record through moediag.recorder, not watcher by watcher": Wrong(
        "ranks/inject/rank.py", "import moediag.recorder.calls"
    ),
    "judgement reads results, not evidence": Wrong(
        "lab/judgement/conclusion.py", "import moediag.evidence.model"
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration and the package's modules."""
    folder = tmp_path_factory.mktemp("contracts")
    shutil.copy(ROOT / "pyproject.toml", folder)
    only_modules = shutil.ignore_patterns("__pycache__", "*.j2", "*.pyc", "*.yaml")
    for package in CONFIG["tool"]["importlinter"]["root_packages"]:
        shutil.copytree(ROOT / package, folder / package, ignore=only_modules)
    return folder


def broken(folder: Path) -> set[str]:
    """Names of the contracts that the package in ``folder`` breaks."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()",
         "--cache-dir", str(folder / "cache")],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    results = dict(re.findall(r"^(.+?) (KEPT|BROKEN)\b", done.stdout, re.MULTILINE))
    assert set(results) == {c["name"] for c in CONTRACTS}, done.stdout + done.stderr
    found = {name for name, result in results.items() if result == "BROKEN"}
    assert done.returncode == (1 if found else 0), done.stdout + done.stderr
    return found


@contextmanager
def with_import(folder: Path, wrong: Wrong) -> Iterator[None]:
    path = folder / "moediag" / wrong.file
    before = path.read_bytes()
    path.write_bytes(before + f"\n{wrong.line}\n".encode())
    try:
        yield
    finally:
        path.write_bytes(before)


def test_the_package_keeps_every_contract(copy: Path) -> None:
    assert broken(copy) == set()


def test_every_contract_has_a_wrong_import() -> None:
    assert set(WRONG) == {c["name"] for c in CONTRACTS}


@pytest.mark.parametrize("contract", [c["name"] for c in CONTRACTS])
def test_a_wrong_import_breaks_the_contract_that_forbids_it(copy: Path, contract: str) -> None:
    """Only this contract is broken, so no contract replaces another."""
    wrong = WRONG[contract]
    with with_import(copy, wrong):
        assert broken(copy) == {contract, *([ACYCLIC] if wrong.cycle else [])}


def test_an_import_only_for_type_checkers_counts(copy: Path) -> None:
    wrong = WRONG[CONTRACTS[0]["name"]]
    hidden = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {wrong.line}"
    with with_import(copy, Wrong(wrong.file, hidden)):
        assert CONTRACTS[0]["name"] in broken(copy)
