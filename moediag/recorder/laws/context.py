"""What the parts of the laws' recorder share: which steps are checked, the log, and names."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch.distributed as dist

from moediag.protocol import ENV_ALLOW, ENV_LAWS, laws_file, older_laws_file
from moediag.recorder.core import ByObject, Recorder
from moediag.recorder.late_imports import when_imported
from moediag.recorder.laws.model_parts import ModelParts
from moediag.recorder.laws.replica_sets import ReplicaSets
from moediag.recorder.log import EventLog
from moediag.recorder.parameter_names import ParameterNames
from moediag.recorder.step.numbers import traced

_SEGMENT_BYTES = 32 * 1024 * 1024
_FIRST = 3  # steps that are always checked


class Moment:
    """A point of a step: calls what watchers do there, in the order in which they were added."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._always: List[Tuple[str, Callable[..., None], Sequence[Any]]] = []
        self._checked: List[Tuple[str, Callable[..., None], Sequence[Any]]] = []

    def add(
        self,
        watcher: str,
        act: Callable[..., None],
        checked: bool = False,
        pending: Sequence[Any] = (True,),
    ) -> None:
        """``checked``: only in checked steps. ``pending``: only while it has elements."""
        self._checked.append((watcher, act, pending))
        if not checked:
            self._always.append((watcher, act, pending))

    def __call__(self, *args: Any) -> None:
        context, recorder = self._context, self._context.recorder
        if traced() or not recorder.active:
            return
        faults, context.known = recorder.faults, {}
        try:
            for watcher, act, pending in self._checked if context.checking else self._always:
                if not pending or (faults and recorder.broken(watcher)):
                    continue
                try:
                    act(*args)
                except Exception as error:
                    recorder.fault(watcher, error)
        finally:
            context.known = None  # it keeps models alive


class LawContext:
    """One rank's log of the laws and what its parts have in common."""

    def __init__(self, recorder: Recorder, folder: str) -> None:
        self.recorder = recorder
        self.every = int(os.environ.get(ENV_LAWS) or 0)
        place = Path(folder)
        self.log = EventLog(
            str(place / laws_file(recorder.rank)),
            str(place / older_laws_file(recorder.rank)),
            _SEGMENT_BYTES,
        )
        recorder.allow = self.allow
        for law in json.loads(os.environ.get(ENV_ALLOW) or "[]"):
            self.allow(law)
        self.known: Optional[Dict[int, ModelParts]] = None  # id of a model -> parts, in a moment
        self.sets = ReplicaSets(recorder, self.parts)
        self.names = ParameterNames(recorder, self.sets.wrapped)
        self.steps = 0  # calls of step() of all optimizers
        self.saves = 0  # calls of torch.save
        # "what = value" of the running step: how many have it, the first one's name
        self.settings: Dict[str, Tuple[int, str]] = {}
        self.closure = False  # the running one was given a closure
        # What embeddings got in the last forward, rows of tokens, and the padding of each.
        self.embedded: List[Tuple[Any, Any]] = []
        # The parameters of the optimizers that stepped, or that the program itself updates.
        self.owned: Callable[[], List[Any]] = list
        self.updated: Optional[List[Any]] = None  # its parameters; None without an optimizer
        # Called with a checked step when its first optimizer is about to step, and any.
        self.on_step: List[Callable[[int], None]] = []
        self.on_check: List[Callable[[int], None]] = []
        # Called with a model, args and kwargs; a loss; nothing; an optimizer, whether it was given
        # a closure, and the frame of the caller; an optimizer.
        self.forward, self.before_backward, self.after_backward, self.before_step, \
            self.after_step = (Moment(self) for _ in range(5))  # fmt: skip
        recorder.on_forward.append(self.forward)
        recorder.hooks.before_backward(self.before_backward)
        recorder.hooks.after_backward(self.after_backward)
        recorder.hooks.before_step(self.before_step)
        recorder.hooks.after_step(self.after_step)
        self._updates = ByObject()  # optimizer -> [calls of step() that returned]
        self.after_step.add("laws of updates", self._updated)
        self._checking = 0, False  # a step, whether it is checked

    @property
    def step(self) -> int:
        """The running step."""
        return self.recorder.current_step

    def event(self, kind: str, keep: bool = False, **fields: Any) -> None:
        """Writes an event of the running step."""
        self.log.event(kind, keep, **{"step": self.recorder.current_step, **fields})

    def line(self, frame: Any) -> str:
        """The innermost line of the user's code."""
        return self.recorder.user_lines.innermost(frame)

    def name(self, module: Any) -> str:
        """Its name in a model that was seen running, or ""."""
        return self.recorder.module_names.get(module) or ""

    def parts(self, root: Any) -> ModelParts:
        """What is in a model, or in a part of one; the same object during a moment."""
        if self.known is None:
            return ModelParts(root)
        if id(root) not in self.known:
            self.known[id(root)] = ModelParts(root)
        return self.known[id(root)]

    def models(self) -> List[ModelParts]:
        """What is in each model that was seen running."""
        return [self.parts(root) for root in self.recorder.models.owners()]

    def replace_late(self, module: str, owner: str, name: str, make: Callable[[Any], Any]) -> None:
        """Sets ``owner.name`` of a module ("": of itself) to ``make(current value)`` once it is
        imported."""

        def act() -> None:
            found = sys.modules[module]
            self.recorder.patches.replace(getattr(found, owner) if owner else found, name, make)

        begin = functools.partial(self.guarded, f"laws of {owner or module}", act)
        self.recorder.on_uninstall.append(when_imported(module, begin))

    def around(
        self,
        watcher: str,
        before: Optional[Callable[[Any, Any], None]] = None,
        after: Optional[Callable[..., None]] = None,
        checked: bool = False,
    ) -> Callable[[Any], Any]:
        """Wraps a function: calls ``before(first argument, frame of the caller)`` and ``after(frame
        of the caller, result, arguments)``. ``checked``: only in checked steps."""

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def function(*args: Any, **kwargs: Any) -> Any:
                seen = not traced() and (self.checking or not checked)
                if seen and before is not None:
                    self.guarded(watcher, before, args[0], sys._getframe(1))
                result = original(*args, **kwargs)
                if seen and after is not None:
                    self.guarded(watcher, after, sys._getframe(1), result, *args, **kwargs)
                return result

            return function

        return make

    def allow(self, law: str) -> None:
        self.log.event("allow", keep=True, law=law)

    def is_checked(self, step: int) -> bool:
        return is_checked(step, self.every)

    @property
    def checking(self) -> bool:
        """Whether the running step is checked."""
        step, checked = self._checking
        if step != self.recorder.current_step:
            step = self.recorder.current_step
            checked = is_checked(step, self.every)
            self._checking = step, checked
        return checked

    def _updated(self, optimizer: Any) -> None:
        self._updates.setdefault(optimizer, [0])[0] += 1

    def updates_of(self, optimizer: Any) -> int:
        """The updates that ``optimizer`` has made."""
        return int((self._updates.get(optimizer) or [0])[0])

    def stepped(self) -> List[Any]:
        """The optimizers that have made an update and still exist, in the order of their first."""
        return self._updates.owners()

    def guarded(self, watcher: str, act: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Calls ``act``; a failure is recorded and does not reach the job."""
        recorder = self.recorder
        if not traced() and recorder.active and not recorder.broken(watcher):
            try:
                act(*args, **kwargs)
            except Exception as error:
                recorder.fault(watcher, error)


def several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_checked(step: int, every: int = 0) -> bool:
    """Whether step ``step`` (from 1) is checked: 1, 2, 3, then every ``every`` steps, or with 0
    the steps 6, 12, 24, …"""
    if step <= _FIRST:
        return step > 0
    if every:
        return step % every == 0
    times, rest = divmod(step, _FIRST)
    return rest == 0 and times & (times - 1) == 0


def next_checked(step: int, every: int = 0) -> int:
    """The first checked step after ``step``."""
    after = step + 1
    if every:
        return after if after <= _FIRST else (step // every + 1) * every
    while not is_checked(after):
        after = _FIRST if after < _FIRST else _FIRST * (1 << (after // _FIRST).bit_length())
    return after
