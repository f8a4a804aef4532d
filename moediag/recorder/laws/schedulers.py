"""Records, at checked steps, how often learning rate schedulers and their optimizers stepped."""

from __future__ import annotations

import functools
import sys
from typing import Any, List

import torch
from torch.optim import lr_scheduler

from moediag.recorder.core import ByObject
from moediag.recorder.late_imports import when_imported
from moediag.recorder.laws.context import LawContext

WATCHER = "laws of schedulers"
_DEEPSPEED = "deepspeed.runtime.lr_schedules"  # its schedulers are no torch schedulers
_MOST_LINES = 2  # that call the step() of one


class _Scheduler:
    """The calls of step() of one scheduler since its optimizer first stepped."""

    __slots__ = ("calls", "kind", "lines", "number")

    def __init__(self, number: int, kind: str) -> None:
        self.number = number
        self.kind = kind
        self.calls = 0
        self.lines: List[str] = []


class Schedulers:
    """Counts the calls of each scheduler, and the updates of its optimizer."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._schedulers = ByObject()  # scheduler -> _Scheduler
        self._updates = ByObject()  # optimizer -> calls of step()

    def install(self) -> None:
        recorder, guarded = self._context.recorder, self._context.guarded
        # torch 2.13 has _update_lr. A frame around step() would be in its warnings, in place of the
        # caller's.
        kind = lr_scheduler.LRScheduler
        if not recorder.patches.replace(kind, "_update_lr", self._wrapped):
            recorder.patches.replace(kind, "step", self._wrapped)
        recorder.on_uninstall.append(when_imported(_DEEPSPEED, self._watch_deepspeed))
        recorder.hooks.after_step(functools.partial(guarded, WATCHER, self._updated))
        self._context.on_step.append(self._write)

    def _watch_deepspeed(self) -> None:
        for kind in list(vars(sys.modules[_DEEPSPEED]).values()):
            own = isinstance(kind, type) and kind.__module__ == _DEEPSPEED
            if own and "step" in vars(kind):
                self._context.recorder.patches.replace(kind, "step", self._wrapped)

    def _updated(self, optimizer: Any) -> None:
        self._updates.set(optimizer, (self._updates.get(optimizer) or 0) + 1)

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._context.guarded(WATCHER, self._called, scheduler, sys._getframe(1))
            return original(scheduler, *args, **kwargs)

        return step

    def _optimizer(self, scheduler: Any) -> Any:
        """The one that steps: transformers' Trainer gives accelerate's wrapper of it."""
        own = scheduler.optimizer
        return own if self._updates.get(own) else getattr(own, "optimizer", own)

    def _called(self, scheduler: Any, frame: Any) -> None:
        if not self._updates.get(self._optimizer(scheduler)):
            return  # the one of its construction, say
        known = self._schedulers.get(scheduler)
        if known is None:
            number = len(self._schedulers.owners())
            known = self._schedulers.set(scheduler, _Scheduler(number, type(scheduler).__name__))
        known.calls += 1
        if known.calls <= _MOST_LINES:
            line = self._context.recorder.user_lines.innermost(frame)
            known.lines += [line] if line and line not in known.lines else []

    def _write(self, step: int) -> None:
        optimizers = self._updates.owners()
        for scheduler in self._schedulers.owners():
            known, optimizer = self._schedulers.get(scheduler), self._optimizer(scheduler)
            self._context.log.event(
                "scheduled", step=step, number=known.number, name=known.kind,
                line=" and ".join(known.lines), calls=known.calls,
                updates=self._updates.get(optimizer), optimizer=optimizers.index(optimizer),
                optimizers=len(optimizers),
            )  # fmt: skip
