"""Records, at checked steps, how often learning rate schedulers and their optimizers stepped, and
the learning rates of optimizers that never step, while others do that have their parameters.

rates       step number(counts the optimizers) name(its class) made(the user's line) rates
"""

from __future__ import annotations

import sys
from typing import Any, List, Set

from torch.optim import Optimizer, lr_scheduler

from moediag.recorder.core import ByObject
from moediag.recorder.late_imports import when_imported
from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.model_values import held_by_engines

WATCHER = "laws of schedulers"
_DEEPSPEED = "deepspeed.runtime.lr_schedules"  # its schedulers are no torch schedulers
_ACCELERATE = "accelerate.scheduler"
_MOST_LINES = 2  # that call the step() of one


class _Scheduler:
    """The calls of step() of one scheduler since its optimizer first stepped."""

    __slots__ = ("calls", "kind", "lines", "made", "number", "prepared")

    def __init__(self, number: int, kind: str, made: str) -> None:
        self.number = number
        self.kind = kind
        self.made = made  # the line of its first call, which is in its construction
        self.calls = 0
        self.lines: List[str] = []  # of those before while there are none
        self.prepared = False  # accelerate calls it


class Schedulers:
    """Counts the calls of each scheduler, and the updates of its optimizer."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._schedulers = ByObject()  # scheduler -> _Scheduler
        self._made = ByObject()  # optimizer -> its number, the user's line that made it
        self._optimizers = 0  # so far; a freed one's number is not used again
        self._wrapped = context.first(WATCHER, self._called)

    def install(self) -> None:
        recorder = self._context.recorder
        # torch 2.13 has _update_lr. A frame around step() would be in its warnings, in place of the
        # caller's.
        kind = lr_scheduler.LRScheduler
        if not recorder.patches.replace(kind, "_update_lr", self._wrapped):
            recorder.patches.replace(kind, "step", self._wrapped)
        recorder.on_uninstall.append(when_imported(_DEEPSPEED, self._watch_deepspeed))
        self._context.on_step.append(self._write)
        making = self._context.first(WATCHER, self._making)
        recorder.patches.replace(Optimizer, "add_param_group", making)

    def _making(self, optimizer: Any, frame: Any) -> None:
        if self._made.get(optimizer) is None:
            line = self._context.recorder.user_lines.innermost(frame)
            self._made.set(optimizer, (self._optimizers, line))
            self._optimizers += 1

    def _watch_deepspeed(self) -> None:
        for kind in list(vars(sys.modules[_DEEPSPEED]).values()):
            own = isinstance(kind, type) and kind.__module__ == _DEEPSPEED
            if own and "step" in vars(kind):
                self._context.recorder.patches.replace(kind, "step", self._wrapped)

    def _optimizer(self, scheduler: Any) -> Any:
        """The one that steps: transformers' Trainer gives accelerate's wrapper of it."""
        own = scheduler.optimizer
        return own if self._context.updates_of(own) else getattr(own, "optimizer", own)

    def _called(self, scheduler: Any, frame: Any) -> None:
        known = self._schedulers.get(scheduler)
        stepped = self._context.updates_of(self._optimizer(scheduler)) > 0
        line = self._context.recorder.user_lines.innermost
        if known is None:
            number, name = len(self._schedulers.owners()), type(scheduler).__name__
            known = self._schedulers.set(scheduler, _Scheduler(number, name, line(frame)))
            if not stepped:
                return
        if stepped and not known.calls:
            known.lines = []
        known.calls += stepped
        callers = frame, frame.f_back
        known.prepared |= any(f and f.f_globals.get("__name__") == _ACCELERATE for f in callers)
        if known.calls <= _MOST_LINES and len(known.lines) < _MOST_LINES:
            at = line(frame)
            known.lines += [at] if at and at not in known.lines else []

    def _write(self, step: int) -> None:
        optimizers = self._context.stepped()
        for scheduler in self._schedulers.owners():
            known, optimizer = self._schedulers.get(scheduler), self._optimizer(scheduler)
            updates = self._context.updates_of(optimizer)
            if updates or (known.lines and self._replaced(optimizer)):
                self._context.log.event(
                    "scheduled", step=step, number=known.number, name=known.kind,
                    line=" and ".join(known.lines), made=known.made, calls=known.calls,
                    prepared=known.prepared, updates=updates,
                    optimizer=optimizers.index(optimizer) if updates else -1,
                    optimizers=len(optimizers),
                )  # fmt: skip

        scheduled = [self._optimizer(scheduler) for scheduler in self._schedulers.owners()]
        for one in self._made.owners():
            number, line = self._made.get(one)
            alone = not self._context.updates_of(one) and not any(one is of for of in scheduled)
            if alone and self._replaced(one):
                self._context.log.event(
                    "rates", step=step, number=number, name=type(one).__name__,
                    made=line, rates=sorted(_rates(one)),
                )  # fmt: skip

    def _replaced(self, optimizer: Any) -> bool:
        """Whether others that step have the parameters of one that never did, or an engine's copies
        of them, and neither a scheduler nor its learning rates, as they would if the program set
        these by hand."""
        own, held = _parameters(optimizer), held_by_engines(self._context.recorder.models.owners())
        stepped = self._context.stepped()
        others = [one for one in stepped if own & held or own & _parameters(one)]
        scheduled = [self._optimizer(scheduler) for scheduler in self._schedulers.owners()]
        every = held.union(*map(_parameters, others))
        apart = all(_rates(optimizer).isdisjoint(_rates(one)) for one in others)
        alone = not any(one is other for one in scheduled for other in others)
        return bool(own and others) and own <= every and apart and alone


def _rates(optimizer: Any) -> Set[float]:
    return {float(group.get("lr") or 0.0) for group in optimizer.param_groups}


def _parameters(optimizer: Any) -> Set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
