"""Records, at checked steps, how often learning rate schedulers and their optimizers stepped.

unused      step number name line made(the user's line)   of a scheduler whose optimizer has never
            stepped: others that step have its parameters, other learning rates and no scheduler
"""

from __future__ import annotations

import functools
import sys
from typing import Any, List, Optional, Set

import torch
from torch.optim import lr_scheduler

from moediag.recorder.core import ByObject
from moediag.recorder.late_imports import when_imported
from moediag.recorder.laws.context import LawContext

WATCHER = "laws of schedulers"
_DEEPSPEED = "deepspeed.runtime.lr_schedules"  # its schedulers are no torch schedulers
_ACCELERATE = "accelerate.scheduler"
_MOST_LINES = 2  # that call the step() of one


class _Scheduler:
    """The calls of step() of one scheduler since its optimizer first stepped."""

    __slots__ = ("calls", "early", "kind", "lines", "number", "prepared")

    def __init__(self, number: int, kind: str) -> None:
        self.number = number
        self.kind = kind
        self.calls = 0
        self.lines: List[str] = []
        self.early: List[str] = []  # of the first calls before that; the first is in its __init__
        self.prepared = False  # accelerate calls it


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
        known = self._schedulers.get(scheduler)
        if known is None:
            number = len(self._schedulers.owners())
            known = self._schedulers.set(scheduler, _Scheduler(number, type(scheduler).__name__))
        line = self._context.recorder.user_lines.innermost
        if not self._updates.get(self._optimizer(scheduler)):
            known.early += [line(frame)] if len(known.early) < _MOST_LINES else []
            return
        known.calls += 1
        callers = frame, frame.f_back
        known.prepared |= any(f and f.f_globals.get("__name__") == _ACCELERATE for f in callers)
        if known.calls <= _MOST_LINES:
            at = line(frame)
            known.lines += [at] if at and at not in known.lines else []

    def _write(self, step: int) -> None:
        optimizers = self._updates.owners()
        for scheduler in self._schedulers.owners():
            known, optimizer = self._schedulers.get(scheduler), self._optimizer(scheduler)
            own = {"step": step, "number": known.number, "name": known.kind}
            if known.calls:
                self._context.log.event(
                    "scheduled", line=" and ".join(known.lines), calls=known.calls,
                    prepared=known.prepared, updates=self._updates.get(optimizer),
                    optimizer=optimizers.index(optimizer), optimizers=len(optimizers), **own,
                )  # fmt: skip
            elif len(known.early) > 1 and self._replaced(optimizer):
                made, line = known.early
                self._context.log.event("unused", made=made, line=line, **own)

    def _replaced(self, optimizer: Any) -> bool:
        """Whether others that step have the parameters of one that never did, and neither a
        scheduler nor its learning rates, as if the program had set these by hand."""
        own = _parameters(optimizer)
        others = [one for one in self._updates.owners() if own & _parameters(one)]
        scheduled = {id(self._optimizer(one)) for one in self._schedulers.owners()}
        rates, new = _rates(optimizer), set().union(*map(_rates, others))
        return (
            not self._updates.get(optimizer)
            and own <= set().union(*map(_parameters, others))
            and scheduled.isdisjoint(map(id, others))
            and None not in rates | new
            and rates.isdisjoint(new)
        )


def _parameters(optimizer: Any) -> Set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _rates(optimizer: Any) -> Set[Optional[float]]:
    rates = (group.get("lr") for group in optimizer.param_groups)
    return {None if rate is None else float(rate) for rate in rates}
