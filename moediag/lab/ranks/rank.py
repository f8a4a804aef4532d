"""The main program of one rank: reads its trial, joins the process group, runs its task, writes the
outcome."""

from __future__ import annotations

import datetime
import functools
import os
from pathlib import Path
from typing import Any, Callable, Dict, Optional

from moediag.protocol import (
    ENV_GUARD,
    ENV_GUARD_TIMEOUT,
    CheckpointTask,
    CheckTask,
    CostTask,
    FamiliesTask,
    GenerateTask,
    Outcome,
    ProgramTask,
    ReferenceTask,
    RelationTask,
    ResumeTask,
    SaveTask,
    SequenceTask,
    StepTask,
    TrainerTask,
    Trial,
)


def main(trial_path: str) -> None:
    """Runs the trial. ``trial_path``: trial.json; its folder receives this rank's files. torch
    elastic sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Raises what the step
    raises."""
    import torch

    trial = Trial.read(trial_path)
    folder = Path(trial_path).parent
    torch.set_num_threads(1)
    alone = {
        ReferenceTask: _reference,
        FamiliesTask: _families,
        RelationTask: _relation,
        CheckpointTask: _checkpoint,
        CheckTask: _check,
        SequenceTask: _sequence,
    }
    alone.get(type(trial.task), _distributed)(trial, folder)


def _reference(trial: Trial, folder: Path) -> None:
    import torch

    from moediag.lab.step.collector import Collector
    from moediag.lab.step.measure import reference
    from moediag.recorder.not_applicable import NotApplicable

    collector = Collector(trial, 0, torch.device("cpu"))
    try:
        reference.run(trial)
        outcome = collector.outcome()
    except NotApplicable as reason:
        outcome = collector.outcome(reason)
    outcome.write(folder)


def _families(_: Trial, folder: Path) -> None:
    from moediag.lab import relations

    relations.listing().write(folder)


def _relation(trial: Trial, folder: Path) -> None:
    from moediag.lab import relations

    relations.run(trial).write(folder)


def _checkpoint(trial: Trial, folder: Path) -> None:
    from moediag.lab import relations

    relations.saved(trial).write(folder)


def _check(trial: Trial, folder: Path) -> None:
    from moediag.lab import check

    check.run(trial, folder).write(folder)


def _sequence(trial: Trial, folder: Path) -> None:
    from moediag.lab.step import sequence

    assert isinstance(trial.task, SequenceTask)
    if trial.task.single:
        sequence.run(trial.task, folder, 0, _reference)
        return
    _join(trial)
    one = functools.partial(_distributed, joined=True)
    sequence.run(trial.task, folder, int(os.environ["RANK"]), one)
    _leave()


def _distributed(trial: Trial, folder: Path, joined: bool = False) -> None:
    """``joined``: the process group exists and stays."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from moediag.lab.step import gpu, kernels

    if not trial.on_gpu:
        kernels.interpret()
    # First, because the Flight Recorder reads its settings once, when the recorder queries it.
    notes = gpu.settle(trial, folder)
    recorder: Any = None
    if trial.record:
        if trial.recorder.guard:
            os.environ[ENV_GUARD] = "1"
            os.environ[ENV_GUARD_TIMEOUT] = str(trial.recorder.guard_timeout)
        from moediag.recorder import install

        recorder = install(str(folder), rank, world_size)
        for note in notes:  # at once: a rank that stops never writes its outcome
            recorder.event("note", keep=True, text=note)
    try:
        _recorded(trial, folder, recorder, joined)
    finally:
        if joined and recorder is not None:
            recorder.uninstall()  # the next trial has its own


def _recorded(trial: Trial, folder: Path, recorder: Any, joined: bool) -> None:
    ended = _noted(folder, recorder) if trial.record and trial.executed else None
    try:
        outcome = _steps(trial, int(os.environ["RANK"]), recorder, joined)
    except BaseException as error:
        if recorder is not None:
            recorder.error(error)
        raise
    finally:
        if ended is not None:
            ended()
    outcome.write(folder)
    if recorder is not None:
        recorder.finish()


def _noted(folder: Path, recorder: Any) -> Optional[Callable[[], None]]:
    """Starts recording which files run; a failure of it must not become the trial's."""
    from moediag.lab.step import executed

    try:
        return executed.start(str(folder), recorder.rank)
    except Exception as error:
        recorder.fault("functions that ran", error)
        return None


def _join(trial: Trial) -> None:
    import torch.distributed as dist

    # Longer than the launch's own limit: the watchdog judges a stall, not the library's timeout.
    timeout = datetime.timedelta(seconds=2 * trial.timeout)
    dist.init_process_group(trial.backend, timeout=timeout)


def _leave() -> None:
    import torch.distributed as dist

    # A rank that aborts does not reach this; one that raises must not wait for its peers.
    if not _raising():
        dist.destroy_process_group()


def _program(collector: Any) -> None:
    from moediag.lab.step import content

    content.program(collector.trial.task.name).run(collector)


def _steps(trial: Trial, rank: int, recorder: Any, joined: bool) -> Outcome:
    import torch

    from moediag.lab.step import gpu
    from moediag.lab.step.collector import Collector
    from moediag.lab.step.tasks import cost, generation, resume, saving, step, trainer
    from moediag.recorder.not_applicable import NotApplicable

    tasks: Dict[type, Callable[[Collector], None]] = {
        StepTask: step.run,
        TrainerTask: trainer.run,
        ResumeTask: resume.run,
        ProgramTask: _program,
        CostTask: cost.run,
        GenerateTask: generation.run,
        SaveTask: saving.run,
    }
    device = gpu.device(trial)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not joined:
        _join(trial)
    collector = Collector(trial, rank, device, recorder)
    try:
        tasks[type(trial.task)](collector)
    except NotApplicable as reason:
        return collector.outcome(reason)
    finally:
        if not joined:
            _leave()
    return collector.outcome()


def _raising() -> bool:
    import sys

    return sys.exc_info()[0] is not None
