"""A trial's task in its file: every kind round-trips, and files without a task are read."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import pytest

from moediag.evidence.trial_folder import read_trial
from moediag.protocol import (
    AttachTask,
    CheckpointTask,
    CheckTask,
    CostTask,
    FamiliesTask,
    GenerateTask,
    ModelSpec,
    ProgramTask,
    ReferenceTask,
    RelationTask,
    ResumedTask,
    ResumeTask,
    SaveTask,
    SequenceTask,
    Size,
    StepTask,
    Task,
    TrainerTask,
    Trial,
    VerifyTask,
    WatchTask,
    task_fields,
)

TASKS = [
    StepTask(),
    TrainerTask(),
    ResumeTask("accelerate", 3, "full", {"dp_shard": 2}),
    ProgramTask("metrics", {"fewer": 1}),
    CostTask(["touch"], model=ModelSpec(layers=7)),
    ReferenceTask(),
    FamiliesTask(),
    CheckTask("folder", simulate=False),
    RelationTask("padding", "left", Size(experts=2)),
    GenerateTask(synced=True),
    SaveTask(),
    CheckpointTask("folder"),
    SequenceTask(["one", "other"]),
    WatchTask(),
    VerifyTask(),
    AttachTask(),
    ResumedTask(),
]
# The fields of trial.json before there was a task.
OLD: list[tuple[dict[str, Any], Task]] = [
    ({"purpose": "step"}, StepTask()),
    ({}, StepTask()),
    ({"wrapper": {"kind": "trl"}}, TrainerTask()),
    (
        {"resume": {"through": "accelerate", "after": 3, "state_dict": "full"}},
        ResumeTask("accelerate", 3, "full"),
    ),
    ({"program": {"name": "metrics", "options": {"fewer": 1}}}, TASKS[3]),
    # The reference of a variant kept the variant's other sections.
    ({"purpose": "reference", "resume": {"through": "dcp"}}, ReferenceTask()),
    ({"purpose": "reference", "wrapper": {"kind": "trainer"}}, ReferenceTask()),
    ({"purpose": "cost", "cost": {"fixes": ["touch"], "model": {"layers": 7}}}, TASKS[4]),
    ({"purpose": "watch"}, WatchTask()),
]


def test_every_kind_of_task_is_tested() -> None:
    assert {type(task) for task in TASKS} == set(typing.get_args(Task))
    assert len({task.kind for task in TASKS}) == len(TASKS)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_a_task_round_trips_through_its_file(task: Task, tmp_path: Path) -> None:
    trial = Trial("t", "s", "v", task=task)
    path = trial.write(tmp_path)
    assert json.loads(path.read_text())["task"]["kind"] == task.kind
    assert Trial.read(path) == trial
    alone = (ReferenceTask, FamiliesTask, RelationTask, CheckTask)
    assert trial.alone == isinstance(task, alone)


@pytest.mark.parametrize(("fields", "task"), OLD)
def test_an_older_file_without_a_task_is_read(
    fields: dict[str, Any], task: Task, tmp_path: Path
) -> None:
    whole = {"name": "t", "scenario": "s", "variant": "v", "schema_version": 1, **fields}
    (tmp_path / "trial.json").write_text(json.dumps(whole))
    assert Trial.read(tmp_path / "trial.json").task == task
    evidence = read_trial(tmp_path)
    assert evidence.watched == isinstance(task, WatchTask)
    assert evidence.program == (task.name if isinstance(task, ProgramTask) else "")


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    whole = {"name": "t", "scenario": "s", "variant": "v", "schema_version": 1}
    (tmp_path / "trial.json").write_text(json.dumps({**whole, "purpose": "load-cost"}))
    with pytest.raises(ValueError, match="unknown kind 'load-cost'"):
        Trial.read(tmp_path / "trial.json")


@pytest.mark.parametrize("fields", [{"task": {}}, {"task": 1}, {"wrapper": []}, {"program": "x"}])
def test_any_content_has_a_kind(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "trial.json").write_text(json.dumps(fields))
    assert task_fields(fields)["kind"] in ("", "step")
    assert read_trial(tmp_path).program == ""
