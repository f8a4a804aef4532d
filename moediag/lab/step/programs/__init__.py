"""Programs: steps that test more than the sharding of a transformers model, one module each.

A program is named in ``moediag.protocol.PROGRAMS`` with its options and their defaults. Its module
has ``run(collector)``, like :mod:`moediag.lab.step.tasks.step`. It computes the correct result
itself, in one process, from the same weights and batches, because only it knows its model. The
recorder is ``paused()`` meanwhile, since that is not part of the job. The rank has joined a process
group. A program raises :class:`moediag.recorder.not_applicable.NotApplicable` if it cannot run.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from moediag.lab.step.collector import Collector
from moediag.protocol import ProgramTask

__all__ = ["load", "run"]


def load(name: str) -> ModuleType:
    """Returns the module of program ``name`` (kebab-case). Raises ImportError."""
    return importlib.import_module(f"moediag.lab.step.programs.{name.replace('-', '_')}")


def run(collector: Collector) -> None:
    """Runs the trial's program. Collective."""
    assert isinstance(collector.trial.task, ProgramTask)
    load(collector.trial.task.name).run(collector)
