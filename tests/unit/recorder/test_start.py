"""What a recorder writes first: a job's packages count once it imported them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from moediag.evidence.events import read_log
from moediag.recorder import install


def test_a_package_that_the_job_never_imported_has_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    made = install(str(tmp_path), 0, 1, of_job=True)
    made.uninstall()
    assert read_log(tmp_path, 0).versions["transformers"] is None


def test_a_package_that_it_imports_later_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lib" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "9.8.7"\n')
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    made = install(str(tmp_path), 0, 1, of_job=True)
    importlib.import_module("transformers")
    monkeypatch.delitem(sys.modules, "transformers")
    made.uninstall()
    assert read_log(tmp_path, 0).versions["transformers"] == "9.8.7"


def test_a_trial_has_the_installed_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "packaging", raising=False)
    made = install(str(tmp_path), 0, 1)
    made.uninstall()
    first = json.loads((tmp_path / "rank-0.events.jsonl").read_text().splitlines()[0])
    assert first["transformers"] is not None
