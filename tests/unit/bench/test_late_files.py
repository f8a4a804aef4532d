"""The file system of ``python -m bench.endurance --faults``: late, hidden, stale."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bench.endurance import faults, late_files
from bench.endurance.late_files import LateFiles


def files(folder: Path, faults: str, process: list[int]) -> LateFiles:
    made = LateFiles(str(folder), faults, 0, lambda: (0, 0, process[0]))
    made._process = lambda: process[0]  # type: ignore[method-assign]
    return made


def test_a_new_name_is_hidden_from_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = [1]
    late = files(tmp_path, "hide", process)
    os.close(late.create("/a", 0o600))
    assert late.readdir("/", 0) == [".", "..", "a"]
    process[0] = 2
    assert late.readdir("/", 0) == [".", ".."]
    with pytest.raises(OSError, match="hidden"):
        late.getattr("/a")
    monkeypatch.setattr(late_files, "HIDDEN", 0.0)
    assert late.readdir("/", 0) == [".", "..", "a"]
    assert late.getattr("/a")["st_size"] == 0


def test_handles_are_stale_and_close_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_files, "STALE", 1.0)
    monkeypatch.setattr(late_files, "CLOSE", 1.0)
    late = files(tmp_path, "stale,close", [1])
    fd = late.create("/a", 0o600)
    with pytest.raises(OSError) as stale:
        late.open("/a", os.O_RDONLY)
    with pytest.raises(OSError) as failed:
        late.flush("/a", fd)
    os.close(fd)
    assert (stale.value.errno, failed.value.errno) == (errno.ESTALE, errno.EIO)
    assert files(tmp_path, "delay", [1]).flush("/a", fd) == 0


def test_without_the_package_the_row_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_files, "missing", lambda: "mfusepy: no module")
    report = faults.Report()
    faults._failing(tmp_path, faults.random.Random(0), report)
    assert (report.cases, report.said) == (0, "not tried: mfusepy: no module")
