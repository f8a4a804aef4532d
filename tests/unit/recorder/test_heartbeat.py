"""A rank's heartbeat, written by two threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from moediag.protocol import Heartbeat
from moediag.recorder import heartbeat
from moediag.recorder.heartbeat import HeartbeatWriter


def test_the_recorder_thread_keeps_the_state_in_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped in the middle of a heartbeat while the rank enters a collective."""
    writer = HeartbeatWriter(str(tmp_path / "beat"))
    writer.beat()
    inside, go = threading.Event(), threading.Event()

    def clock() -> float:
        if threading.current_thread() is beating:
            inside.set()
            go.wait(30)
        return 1.0

    monkeypatch.setattr(heartbeat.time, "time", clock)
    beating = threading.Thread(target=writer.beat)
    entering = threading.Thread(target=writer.enter, args=(5,))
    beating.start()
    assert inside.wait(30)
    entering.start()
    entering.join(0.2)  # without a lock it has entered by now
    go.set()
    beating.join()
    entering.join()
    found = Heartbeat.read(tmp_path / "beat")
    assert found is not None and (found.state, found.collective) == ("in-collective", 5)
    writer.close()


def test_a_heartbeat_without_an_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "beat").symlink_to("/dev/zero")
    assert Heartbeat.read(tmp_path / "beat") is None


def test_a_full_disk_is_an_error_before_the_mapping_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to a mapping without blocks on the disk kills the process (SIGBUS)."""
    monkeypatch.setattr(heartbeat.os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="No space left"):
        HeartbeatWriter(str(tmp_path / "beat"))
    monkeypatch.undo()
    HeartbeatWriter(str(tmp_path / "beat")).beat()
    assert (tmp_path / "beat").stat().st_size == Heartbeat.SIZE
