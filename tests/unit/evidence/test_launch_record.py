"""launch.json: it round-trips, and what can be read of a damaged file is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moediag.errors import UsageError
from moediag.evidence.launch_record import Death, LaunchRecord, read_launch
from moediag.evidence.model import ExitStatus, Stall
from moediag.lab.launch.launcher import launcher
from moediag.lab.launch.torchrun import rendezvous
from moediag.launch.base import json_lines, last_words
from moediag.launch.settings import LaunchOptions
from moediag.protocol import LAUNCH_FILE

FULL = LaunchRecord(
    started=1.5,
    ended=9.25,
    launcher="fork",
    first_progress=2.0,
    exits={0: ExitStatus(signal="SIGTERM", by_us=True), 1: ExitStatus(code=1)},
    deaths=(Death(1, 3.0),),
    stall=Stall(0.5, 3.0, (0,), (1,)),
    capture_seconds=0.75,
    not_seen=("rank 0: native frames (py-spy missing)",),
    pids={0: 11, 1: 12},
    notes=("a note",),
)


def test_launch_record_round_trips(tmp_path: Path) -> None:
    path = FULL.write(tmp_path)
    assert path.name == LAUNCH_FILE
    assert read_launch(path) == FULL


def test_launch_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    exits = {
        "0": {"code": 1, "signal": None, "by_us": False},
        "1": None,
        "2": {"signal": "SIGKILL"},
    }
    stall = {"at": 1.5, "window": 3, "waiting": [0], "elsewhere": [1]}
    deaths = [{"rank": 2, "time": 8.0}, {"rank": 0, "time": 7.0}, "x"]
    path.write_text(
        json.dumps({"exits": exits, "stall": stall, "deaths": deaths, "not_seen": ["pystack"]})
    )
    facts = read_launch(path)
    assert facts.exits == {0: ExitStatus(1), 2: ExitStatus(signal="SIGKILL")}
    assert facts.stall == Stall(1.5, 3.0, (0,), (1,))
    assert [death.rank for death in facts.deaths] == [0, 2]
    assert facts.not_seen == ("pystack", "rank 1: how it ended (launch.json)")


def test_succeeded_needs_every_exit_to_be_zero() -> None:
    good = LaunchRecord(started=0, ended=1, exits={0: ExitStatus(code=0)})
    assert good.succeeded
    assert not LaunchRecord(started=0, ended=1).succeeded
    assert not FULL.succeeded


def test_an_unknown_launcher_and_fork_on_two_nodes_are_refused(tmp_path: Path) -> None:
    class Stack:
        python, pythonpath, key = Path("python"), list[Path](), "k"

    with pytest.raises(UsageError, match="spawn"):
        launcher("spawn", Stack(), tmp_path)
    with pytest.raises(UsageError, match="one node"):
        launcher("fork", Stack(), tmp_path, LaunchOptions(nnodes=2))
    with pytest.raises(UsageError, match="folder that all of them reach"):
        launcher("torchrun", Stack(), tmp_path, LaunchOptions(nnodes=2))


def test_rendezvous_depends_on_the_number_of_nodes() -> None:
    assert "--rdzv-endpoint=127.0.0.1:0" in rendezvous(LaunchOptions(), "t", False)
    two = LaunchOptions(nnodes=2, rdzv_endpoint="a:29400", node_rank=1)
    several = rendezvous(two, "t", False)
    assert {"--nnodes=2", "--rdzv-endpoint=a:29400", "--node-rank=1"} <= set(several)
    assert "--nnodes=1" in rendezvous(two, "t", True)
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        rendezvous(LaunchOptions(nnodes=2), "t", False)


def test_half_written_lines_are_skipped() -> None:
    assert json_lines('{"e": 1}\n7\n{"e": 2}\n{"e"') == [{"e": 1}, {"e": 2}]


def test_last_words_of_a_log_are_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a\nb\nc\n")
    assert last_words(tmp_path / "log", 2) == "b\nc"
    assert last_words(tmp_path / "none") == ""


@pytest.mark.parametrize(("field", "value"), [
    ("exits", 3), ("exits", {"x": {"code": 0}}), ("deaths", {"rank": 1}), ("pids", {"x": 1}),
    ("stall", {"at": "x"}), ("started", None), ("notes", [1]), ("timed_out", "yes"),
])  # fmt: skip
def test_a_broken_field_leaves_the_others(tmp_path: Path, field: str, value: object) -> None:
    path = FULL.write(tmp_path)
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, field: value}))
    read = read_launch(path)
    assert getattr(read, field) == getattr(LaunchRecord(), field)
    assert replace(read, **{field: getattr(FULL, field)}, not_seen=FULL.not_seen) == FULL
    assert (read.not_seen != FULL.not_seen) == (field == "stall" or value == {"x": {"code": 0}})


def test_a_death_without_a_time_is_read(tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text('{"deaths": [{"rank": 1}, {"rank": 0, "time": null}]}')
    assert read_launch(tmp_path / "launch.json").deaths == (Death(1), Death(0))
