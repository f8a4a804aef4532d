"""The folder of a run: always new or empty."""

import errno
from pathlib import Path
from typing import Any

import pytest

from moediag.errors import UsageError
from moediag.pipeline.run_folder import run_folder


def test_an_unusable_out_folder_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="is a file, or below one"):
            run_folder(out, "s")
    with pytest.raises(UsageError, match="nowhere/x: No such file"):
        run_folder(Path("/proc/nowhere/x"), "s")
    with pytest.raises(UsageError, match="not empty"):
        run_folder(tmp_path, "s")


def test_a_full_disk_is_not_wrong_usage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="No space"):
        run_folder(tmp_path / "new", "s")


def test_two_runs_in_the_same_second_get_separate_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that share a disk; neither sees the other's folder before it creates its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert len({run_folder(None, "watch-train.py") for _ in range(3)}) == 3
