"""What a recorder writes first: a job's packages count once it imported them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
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


def test_the_nccl_that_the_process_calls_is_told(tmp_path: Path) -> None:
    """LD_PRELOAD's comes first although torch's is loaded from its own file as well."""
    ask = "import ctypes, sys; ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)\n"
    ask += "from moediag.recorder import start; print(start._loaded_nccl())"

    def library(folder: str, code: int) -> str:
        path = tmp_path / folder / "libnccl.so.2"
        path.parent.mkdir()
        source = f"int ncclGetVersion(int *v) {{ *v = {code}; return 0; }}"
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-o", str(path), "-"]
        subprocess.run(command, input=source, text=True, check=True)
        return str(path)

    newer, own = library("newer", 23007), library("own", 22809)
    for preload, argument, found in (
        (newer, [own], "(2, 30, 7)"), ("", [own], "(2, 28, 9)"),
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", ask, *argument], capture_output=True, text=True, check=True,
            env=os.environ | {"LD_PRELOAD": preload},
        )  # fmt: skip
        assert done.stdout.strip() == found
