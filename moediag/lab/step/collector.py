"""One rank's part of a trial: the loop over its training steps, and its measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from importlib import metadata
from typing import Any, Callable, ContextManager, Dict, Iterator, Optional

import torch

from moediag.lab.step.measure import replicas
from moediag.lab.step.models.skew import RouterSkew
from moediag.protocol import Outcome, ProgramTask, Trial

_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "trl", "torchtitan", "triton")


class Unrecorded:
    """Replaces the recorder in a trial that is not recorded."""

    def step(self, number: int) -> None: ...

    def phase(self, text: str) -> None: ...

    def event(self, kind: str, keep: bool = False, **fields: Any) -> None: ...

    def decision(self, what: str, value: Any) -> None: ...

    def finding(self, what: str, text: str, **details: Any) -> None: ...

    def error(self, exception: BaseException) -> None: ...

    def finish(self) -> None: ...

    def paused(self) -> ContextManager[None]:
        return contextlib.nullcontext()


class Collector:
    """The interface of a task: its inputs, and where it puts its measurements."""

    def __init__(self, trial: Trial, rank: int, device: torch.device, recorder: Any = None) -> None:
        self.trial = trial
        self.rank = rank
        self.device = device
        self.recorder: Any = Unrecorded() if recorder is None else recorder
        # Tasks fill its lists and dicts; `set` replaces other fields.
        self.measured = Outcome(rank=rank)

    @property
    def options(self) -> Dict[str, Any]:
        """Returns all options of the trial's program."""
        assert isinstance(self.trial.task, ProgramTask)
        return self.trial.task.options

    def set(self, **fields: Any) -> None:
        """Replaces fields of ``measured``."""
        self.measured = dataclasses.replace(self.measured, **fields)

    def note(self, *texts: str) -> None:
        """Adds notes on how the trial was run. They are recorded at once, because only a rank that
        reaches its end writes an Outcome."""
        for text in texts:
            if text in self.measured.notes:
                continue
            self.measured.notes.append(text)
            self.recorder.event("note", keep=True, text=text)

    def begin(self, number: int, skew: Optional[RouterSkew] = None) -> None:
        """Tells the recorder and ``skew`` that training step ``number`` (from 1) begins."""
        self.recorder.step(number)
        if skew is not None:
            skew.set_step(number)

    def steps(
        self,
        observed: Optional[replicas.Observed] = None,
        optimize: Optional[Callable[[int], Optional[bool]]] = None,
        skew: Optional[RouterSkew] = None,
        first: int = 1,
        last: Optional[int] = None,
    ) -> Iterator[int]:
        """Yields the number of each training step, ``first`` to ``last`` (None: the trial's last).

        The caller runs forward and backward. Then ``optimize(number)`` clips and steps the
        optimizer; training ends early when it returns False. Replicas of ``observed`` are measured
        before training, before clipping and after the optimizer.
        """
        observer = observed and replicas.Observer(observed, self.trial.world_size)
        for number in range(first, (last or self.trial.step.steps) + 1):
            self.begin(number, skew)
            yield number
            if observer:
                observer.before_clip()
            going_on = optimize is None or optimize(number) is not False
            if observer:
                observer.after_optimizer(number)
                self.measured.replicas.update(observer.steps)
            if not going_on:
                return
            self.set(steps_done=number)

    def outcome(self, refusal: Optional[BaseException] = None) -> Outcome:
        """Returns the measurements with versions; with ``refusal`` only why there are none."""
        kept = self.measured
        if refusal is not None:
            kept = Outcome(rank=self.rank, applicable=str(refusal))
        return dataclasses.replace(kept, versions=versions())


def versions() -> Dict[str, Optional[str]]:
    """Returns package -> version or None; ``python`` always has one."""
    found: Dict[str, Optional[str]] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
