"""What answers in a running job: the Flight Recorder through its pipe."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from moediag.launch.attach import listeners
from moediag.launch.attach.looking import Target
from moediag.launch.attach.proc import Proc
from moediag.launch.processes import Process


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    made = tmp_path / "capture"
    made.mkdir()
    return made


def machine(root: Path, **variables: str) -> tuple[Proc, Target]:
    """A /proc in which this process has ``variables``."""
    folder = root / "proc" / str(os.getpid())
    folder.mkdir(parents=True)
    (folder / "root").symlink_to("/")
    (folder / "maps").write_text("")
    (folder / "environ").write_text("".join(f"{k}={v}\0" for k, v in variables.items()))
    return Proc(root / "proc"), Target(3, Process.of(os.getpid()))


def variables(root: Path) -> dict[str, str]:
    return {listeners.PIPES[0]: f"{root}/pipe-", listeners.DUMPS[0]: f"{root}/dump-"}


def test_a_dump_is_asked_for_and_kept(tmp_path: Path, capture: Path) -> None:
    proc, target = machine(tmp_path, **variables(tmp_path))
    os.mkfifo(tmp_path / "pipe-3.pipe")
    reader = os.open(tmp_path / "pipe-3.pipe", os.O_RDWR)  # waits for a writer

    def monitor() -> None:
        assert os.read(reader, 8) == b"1\n"
        (tmp_path / "dump-3").write_bytes(b"a dump")

    thread = threading.Thread(target=monitor)
    thread.start()
    try:
        assert listeners.ask(tmp_path, capture, [target], proc) == []
    finally:
        thread.join()
        os.close(reader)
    assert (capture / "rank-3.flight").read_bytes() == b"a dump"


def test_a_pipe_that_nobody_reads(tmp_path: Path, capture: Path) -> None:
    proc, target = machine(tmp_path, **variables(tmp_path))
    os.mkfifo(tmp_path / "pipe-3.pipe")
    assert listeners.ask(tmp_path, capture, [target], proc) == [
        "rank 3: Flight Recorder (the rank did not answer)"
    ]


@pytest.mark.parametrize(("written", "kept"), [(True, True), (False, False)])
def test_a_dump_that_the_watchdog_wrote(
    written: bool, kept: bool, tmp_path: Path, capture: Path
) -> None:
    """One of an earlier job at the same path is not taken."""
    proc, target = machine(tmp_path, **variables(tmp_path))
    (tmp_path / "dump-3").write_bytes(b"a dump")
    if not written:
        os.utime(tmp_path / "dump-3", (1.0, 1.0))
    listeners.ask(tmp_path, capture, [target], proc)
    assert (capture / "rank-3.flight").exists() == kept


def test_a_job_without_nccl_lacks_nothing(tmp_path: Path, capture: Path) -> None:
    proc, target = machine(tmp_path)
    assert listeners.ask(tmp_path, capture, [target], proc) == []
    assert not [*capture.iterdir()]
