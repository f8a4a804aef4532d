"""The log keeps complete lines within its limit, also on disk errors; heartbeats can be read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moediag.protocol import EVENT_KINDS, Heartbeat
from moediag.recorder.heartbeat import HeartbeatWriter
from moediag.recorder.log import EventLog


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


@pytest.fixture
def log(tmp_path: Path) -> EventLog:
    return EventLog(str(tmp_path / "now"), str(tmp_path / "older"))


def test_events_are_lines_of_json(log: EventLog, tmp_path: Path) -> None:
    log.event("phase", name='two\nlines and "quotes" \udc80', step=1)
    assert log.names(("a", "b")) == log.names(("a", "b")) == "0"
    assert log.names(("b", "a")) == "1"
    kinds = [record["e"] for record in lines(tmp_path / "now")]
    assert kinds == ["phase", "names", "names"]
    assert set(kinds) <= set(EVENT_KINDS)


def test_the_log_is_bounded_and_each_segment_is_self_contained(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path / "now"), str(tmp_path / "older"), segment_bytes=2000)
    log.event("start", keep=True, rank=0)
    names = int(log.names(("p",)))
    for number in range(500):
        log.event("no_gradient", step=number, names=names)
    now, older = lines(tmp_path / "now"), lines(tmp_path / "older")
    assert (tmp_path / "now").stat().st_size <= 2000
    assert (tmp_path / "older").stat().st_size <= 2000
    for segment in (now, older):
        assert [record["e"] for record in segment[:2]] == ["start", "names"]
    steps = [record["step"] for record in older + now if record["e"] == "no_gradient"]
    assert steps == list(range(steps[0], 500)), "the newest events are kept, without a hole"


def test_a_closed_descriptor_loses_events_and_raises_nothing(log: EventLog) -> None:
    os.close(log._fd)
    assert log.event("phase", name="x", step=1) is False
    assert log.lost == 1


def test_a_line_after_a_truncated_one_is_complete(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
    assert log.event("phase", name="torn", step=1) is False
    monkeypatch.setattr(os, "write", real)
    assert log.event("phase", name="whole", step=2) is True
    torn, *rest = (tmp_path / "now").read_text().splitlines()
    with pytest.raises(json.JSONDecodeError):
        json.loads(torn)
    texts = [json.loads(line) for line in rest]
    assert [record["e"] for record in texts] == ["phase", "not_seen"]
    assert "1 events were lost" in texts[1]["text"]


def test_the_number_of_stored_names_is_limited(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moediag.recorder.log.MAX_NAMES", 3)
    ids = [log.names((str(number),)) for number in range(5)]
    assert ids == ["0", "1", "2", "null", "null"]


def test_heartbeat_contains_state_collective_and_progress(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    pulse = HeartbeatWriter(str(path))

    def read() -> tuple[str, int, int]:
        seen = Heartbeat.read(path)
        assert seen is not None
        return seen.state, seen.collective, seen.progress

    assert read() == ("starting", -1, 0)
    pulse.beat()
    assert read() == ("running", -1, 1)
    outer = pulse.enter(7)
    inner = pulse.enter(8)
    assert read() == ("in-collective", 8, 1)
    pulse.leave(inner)
    assert read() == ("in-collective", 7, 1)
    pulse.leave(outer)
    assert read() == ("running", -1, 1)
    pulse.finish()
    assert read() == ("finished", -1, 1)
    assert path.stat().st_size == Heartbeat.SIZE
