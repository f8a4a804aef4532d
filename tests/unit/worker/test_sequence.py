"""Several trials in the same processes: each begins as the first did."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from moediag.lab.step import sequence
from moediag.protocol import SequenceTask, Trial, heartbeat_file, output_file

TASK = SequenceTask(["first", "second"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in TASK.trials:
        (tmp_path / name).mkdir()
        Trial(name, "hunt", name).write(tmp_path / name)
    return tmp_path


def test_a_trial_does_not_see_what_the_one_before_it_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    seen = []

    def one(trial: Trial, place: Path) -> None:
        assert place == folder / trial.name
        seen.append((os.environ.get("FSDP_VERSION"), float(torch.rand(1))))
        os.environ["FSDP_VERSION"] = "2"
        (place / heartbeat_file(0)).write_text(trial.name)

    sequence.run(TASK, folder, 0, one)
    assert len(seen) == 2 and seen[0] == seen[1]
    assert "FSDP_VERSION" not in os.environ
    assert (folder / heartbeat_file(0)).read_text() == "second", "the watchdog reads one file"


@pytest.mark.parametrize("others", [True, False])
def test_an_exception_ends_the_sequence_unless_all_ranks_raise(
    folder: Path, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "TOGETHER", 0.0)
    ran = []

    def one(trial: Trial, place: Path) -> None:
        ran.append(trial.name)
        if trial.name == "first":
            if others:
                (place / output_file(1)).touch()
            raise ValueError("refused")

    if others:
        sequence.run(TASK, folder, 0, one)
    else:
        with pytest.raises(ValueError, match="refused"):
            sequence.run(TASK, folder, 0, one)
    assert ran == (TASK.trials if others else ["first"])
    assert "ValueError: refused" in (folder / "first" / output_file(0)).read_text()


def test_a_reference_that_fails_does_not_end_the_others(folder: Path) -> None:
    ran = []

    def one(trial: Trial, place: Path) -> None:
        ran.append(trial.name)
        raise ValueError("refused")

    sequence.run(SequenceTask(TASK.trials, single=True), folder, 0, one)
    assert ran == TASK.trials
