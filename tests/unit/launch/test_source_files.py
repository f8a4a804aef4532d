"""Copies of the source files that a job runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from moediag import protocol
from moediag.launch.capture import source_files
from moediag.launch.processes import Process

FAULT = 'Current thread 0x01 [MainThread] (most recent call first):\n  File "{}", line 1 in f\n'


def kept(folder: Path, *paths: str) -> dict[str, dict[str, str]]:
    """What is kept for a rank, this process, with these files on its stack."""
    capture = folder / "capture"
    capture.mkdir()
    frames = [{"filename": path, "line": 1, "name": "f"} for path in paths]
    threads = [{"thread_name": "MainThread", "frames": frames}]
    (capture / "rank-0.pyspy.json").write_text(json.dumps(threads))
    source_files.keep(folder, {0: Process.of(os.getpid())})
    written = capture / source_files.SOURCE_FILE
    return json.loads(written.read_text()) if written.exists() else {"files": {}, "lost": {}}


@pytest.fixture
def long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job started after the files of this test were written."""
    monkeypatch.setattr(Process, "epoch", time.time() + 60)


@pytest.mark.usefixtures("long_ago")
def test_the_files_of_the_users_frames_are_kept(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text("x = 1\n")
    library = "/env/lib/python3.12/site-packages/torch/nn/modules/module.py"
    found = kept(tmp_path, str(train), library, "<frozen importlib>")
    assert found == {"files": {str(train): "x = 1\n"}, "lost": {}}


def test_a_file_that_changed_after_the_start_is_not_what_runs(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text("x = 1\n")
    os.utime(train, (0, 0))  # as `cp -p` or rsync would set it
    found = kept(tmp_path, str(train))
    assert found == {"files": {}, "lost": {str(train): "changed after the job started"}}


def test_a_missing_file(tmp_path: Path) -> None:
    found = kept(tmp_path, str(tmp_path / "gone.py"))
    assert found["lost"] == {str(tmp_path / "gone.py"): "No such file or directory"}


@pytest.mark.usefixtures("long_ago")
def test_a_relative_path_is_below_the_folder_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    assert kept(tmp_path, "train.py")["files"] == {"train.py": "x = 1\n"}


@pytest.mark.usefixtures("long_ago")
def test_faulthandlers_frames_count_as_well(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text("x = 1\n")
    (tmp_path / protocol.stacks_file(0)).write_text(FAULT.format(train))
    assert kept(tmp_path)["files"] == {str(train): "x = 1\n"}


@pytest.mark.usefixtures("long_ago")
def test_files_of_recorded_calls_count_as_well(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text("x = 1\n")
    event = json.dumps({"e": "file", "t": 1.0, "path": str(train)}, separators=(",", ":"))
    (tmp_path / protocol.events_file(0)).write_text(f"{event}\n{{broken\n")
    assert kept(tmp_path)["files"] == {str(train): "x = 1\n"}


@pytest.mark.usefixtures("long_ago")
def test_files_that_were_kept_stay_as_they_were(tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text("x = 1\n")
    kept(tmp_path, str(train))
    train.write_text("x = 2\n")
    source_files.keep(tmp_path, {0: Process.of(os.getpid())})
    raw = json.loads((tmp_path / "capture" / source_files.SOURCE_FILE).read_text())
    assert raw["files"] == {str(train): "x = 1\n"}


@pytest.mark.usefixtures("long_ago")
def test_imported_files_that_have_to_do_with_ranks_are_kept(tmp_path: Path) -> None:
    train = tmp_path / "project" / "train" / "main.py"
    texts = {
        train: "from project.utils import dist\nfrom .settings import KEY\nimport torch, other\n",
        tmp_path / "project" / "utils" / "__init__.py": "from .dist import *\n",
        tmp_path / "project" / "utils" / "dist.py": "def first(args): return args.rank == 0\n",
        train.with_name("settings.py"): "KEY = 'secret'\n",
        train.with_name("unused.py"): "rank = 0\n",
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = kept(tmp_path, str(train))
    assert found["lost"] == {}
    assert sorted(found["files"]) == [str(train), str(tmp_path / "project" / "utils" / "dist.py")]


def test_imports_of_text_that_is_not_python() -> None:
    assert source_files.imported("/me/train.py", "import (") == []
    assert source_files.imported("train.py", "import other") == []


def test_a_job_without_frames_keeps_nothing(tmp_path: Path) -> None:
    assert kept(tmp_path) == {"files": {}, "lost": {}}
