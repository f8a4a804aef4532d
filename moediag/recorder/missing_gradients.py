"""Records parameters without a gradient: those whose ``.grad`` is None when the optimizer steps."""

from __future__ import annotations

from typing import Any, List

from moediag.recorder.core import Recorder
from moediag.recorder.parameter_names import ParameterNames, parameters_of

WATCHER = "gradients"


class Gradients:
    """Looks at the gradients before each update of an optimizer."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._names = ParameterNames(recorder)

    def install(self) -> None:
        self._recorder.hooks.before_step(self._before)
        self._recorder.hooks.after_step(self._after)

    def _before(self, optimizer: Any, *_: Any) -> None:
        recorder = self._recorder
        if not recorder.active:
            return
        try:
            recorder.flush()
            # In FSDP1, a parameter whose shard is on another rank is empty and has no gradient.
            missing = [p for p in parameters_of(optimizer)
                       if p.grad is None and p.requires_grad and p.numel()]  # fmt: skip
            if missing:
                self._write(missing)
        except Exception as error:
            recorder.fault(WATCHER, error)
        recorder.optimizer_running = True

    def _after(self, *_: Any) -> None:
        if self._recorder.active:
            self._recorder.optimizer_running = False
            self._recorder.stepped = True

    def _write(self, missing: List[Any]) -> None:
        recorder = self._recorder
        fqns = [name for name, _ in self._names.known(missing)]
        if len(fqns) < len(missing):
            recorder.note_not_seen(
                "names of parameters without a gradient that belong to no module seen running"
            )
        names = recorder.log.names(tuple(fqns)) if fqns else "null"
        if names != "null":
            recorder.event("no_gradient", step=recorder.current_step, names=int(names))
