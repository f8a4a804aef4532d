"""launch.json: it round-trips, and damaged files are errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from moediag.errors import EvidenceError, UsageError
from moediag.evidence.model import ExitStatus, Stall
from moediag.lab.launch.launcher import launcher
from moediag.lab.launch.torchrun import rendezvous
from moediag.launch.base import json_lines, last_words
from moediag.launch.record import Death, LaunchRecord
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
    assert LaunchRecord.read(path) == FULL
    assert LaunchRecord.read(tmp_path) == FULL


def test_succeeded_needs_every_exit_to_be_zero() -> None:
    good = LaunchRecord(started=0, ended=1, exits={0: ExitStatus(code=0)})
    assert good.succeeded
    assert not LaunchRecord(started=0, ended=1).succeeded
    assert not FULL.succeeded


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema_version": 99}', '{"schema_version": 1, "exits": 3}', "{"]
)
def test_a_damaged_file_is_an_evidence_error_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / LAUNCH_FILE).write_text(text)
    with pytest.raises(EvidenceError, match=LAUNCH_FILE):
        LaunchRecord.read(tmp_path)


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
