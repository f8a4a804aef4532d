"""Predicts a cell in one process of the release's environment, without launching ranks."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from moediag.errors import LaunchError, NoEnvironments, StackError
from moediag.lab.campaign.matrix.cells import COULD_NOT_RUN, Cell, Mode, of_susceptibility
from moediag.lab.campaign.matrix.question import Subject
from moediag.lab.launch.hosts import Hosts
from moediag.lab.pipeline.trials import last_line
from moediag.lab.scenario.plan import plan
from moediag.lab.stacks import environment
from moediag.lab.stacks.releases import Release
from moediag.lab.stacks.resolve import Progress
from moediag.launch.settings import LaunchOptions
from moediag.protocol import Susceptibility, SusceptibilityTask, Trial, output_file

NAME = "susceptibility"


def predict(
    subject: Subject,
    release: Release,
    folder: Path,
    hosts: Hosts,
    launch: LaunchOptions,
    building: Progress,
) -> Cell:
    """Predicts a cell. ``folder``: new, for the files of the process; the cell names it relative to
    its third parent. A release that cannot be tried is a cell, not an error. Raises NoEnvironments
    if no environment can be built, Interrupted and KeyboardInterrupt."""
    began = time.monotonic()
    evidence = str(Path(*folder.parts[-3:]))
    try:
        stack = environment.ensure(subject.question.request(release), building)
        with hosts.launcher("fork", stack, folder, launch) as host:
            host.run(_trial(subject), folder / NAME)
        found = Susceptibility.read(folder / NAME)
    except NoEnvironments:
        raise
    except (StackError, LaunchError) as error:
        return _nothing(subject, release, began, error.message)
    except (OSError, ValueError):
        log = folder / NAME / output_file(0)
        return _nothing(subject, release, began, last_line(log) or "the process left no answer",
                        evidence)  # fmt: skip
    spent = round(time.monotonic() - began, 3)
    return of_susceptibility(subject.key, release.version, found, spent, evidence, subject.digest)


def _trial(subject: Subject) -> Trial:
    """Returns the unfixed variant's trial, in one process."""
    question = subject.question
    asked = question.asked
    planned = plan(
        question.scenario, question.world_size, asked.device, [question.variant], "fork",
        timeout=asked.timeout,
    ).trials[0]  # fmt: skip
    return dataclasses.replace(
        planned.trial, name=NAME, task=SusceptibilityTask(), fix=None, record=False
    )


def _nothing(
    subject: Subject, release: Release, began: float, why: str, evidence: str = ""
) -> Cell:
    spent = round(time.monotonic() - began, 3)
    return Cell(
        subject.key, release.version, Mode.FAST, COULD_NOT_RUN, None, " ".join(why.split()),
        spent, evidence, subject.digest,
    )  # fmt: skip
