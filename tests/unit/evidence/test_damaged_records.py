"""Damage that the endurance campaign found to end moediag."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from moediag.cli.app import _known
from moediag.configuration import Configuration
from moediag.errors import ExitCode
from moediag.evidence.events import read_log
from moediag.evidence.exits import read_error_file
from moediag.evidence.launch_record import read_launch
from moediag.protocol import Outcome, events_file
from moediag.protocol.user_code import is_moediag
from moediag.result.wording import seconds


@pytest.mark.parametrize("not_seen", [1, 0.5, {"a": 1}, None])
def test_what_was_not_seen_is_a_list(not_seen: object, tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.write_text(json.dumps({"schema_version": 1, "not_seen": not_seen}))
    assert read_launch(path).not_seen == ()
    path.write_text(json.dumps({"schema_version": 1, "not_seen": ["a", 1]}))
    assert read_launch(path).not_seen == ("a", "1")


def test_an_endless_step_is_garbage(tmp_path: Path) -> None:
    good = {"e": "start", "world_size": 2}
    bad = '{"e": "start", "world_size": 1e999}'
    (tmp_path / events_file(0)).write_text(f"{json.dumps(good)}\n{bad}\n")
    log = read_log(tmp_path, 0, {})
    assert (log.world_size, log.garbage) == (2, 1)


def test_a_number_beyond_a_float_is_no_time(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    said = {"message": "ValueError: no", "extraInfo": {"timestamp": 10**400}}
    path.write_text(json.dumps({"message": said}))
    error = read_error_file(path)
    assert error is not None
    assert (error.message, error.time) == ("no", 0.0)
    path = tmp_path / "launch.json"
    stall = {"at": 10**400, "window": 3.0, "waiting": [0]}
    ends = {"0": {"code": 1e999}}
    path.write_text(json.dumps({"schema_version": 1, "stall": stall, "exits": ends}))
    read = read_launch(path)
    assert (read.stall, read.exits) == (None, {})
    assert len(read.not_seen) == 2


def test_names_in_a_log_are_text(tmp_path: Path) -> None:
    lines = [
        {"e": "group", "group": "0", "ranks": [0, 1], "axis": ["dp"]},
        {"e": "collective", "n": 0, "k": 0, "group": "0", "op": "all_reduce", "reduce": {"a": 1}},
    ]
    (tmp_path / events_file(0)).write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = read_log(tmp_path, 0, {})
    assert (log.groups["0"].axis, log.collectives[0].reduce) == ("['dp']", "{'a': 1}")


@pytest.mark.parametrize("step", ["x", "-1", "9" * 5000])
def test_a_step_of_an_outcome_is_a_number(step: str, tmp_path: Path) -> None:
    assert Outcome.read(Outcome(0, metrics={"1": {"loss": 0.5}}).write(tmp_path)).metrics
    path = Outcome(0, metrics={step: {"loss": 0.5}}).write(tmp_path)
    with pytest.raises(ValueError, match=r"metrics: .* is no step"):
        Outcome.read(path)


def test_endless_seconds_have_no_minutes() -> None:
    assert (seconds(float("inf")), seconds(125.0)) == ("inf s", "2 min 5 s")


def test_a_file_name_that_is_too_long_is_no_module_of_moediag() -> None:
    assert is_moediag("/x/moediag/recorder/log.py")
    assert not is_moediag(f"/x/moediag/recorder/{'[' * 5000}.py")


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_file_system_that_fails_is_no_bug(code: int) -> None:
    known = _known(OSError(code, os.strerror(code), "/x/result.json"), Configuration(), ())
    assert known is not None
    assert known.exit_code == ExitCode.CANNOT_RUN_HERE
    assert known.message == f"the file system fails: {os.strerror(code)}: /x/result.json"


def test_too_little_memory_is_no_bug() -> None:
    known = _known(MemoryError(), Configuration(), ())
    assert known is not None
    assert known.exit_code == ExitCode.CANNOT_RUN_HERE
    assert _known(KeyError("x"), Configuration(), ()) is None
