"""Records parameters without a gradient: those whose ``.grad`` is None when the optimizer steps."""

from __future__ import annotations

from typing import Any, List

from moediag.recorder.core import Recorder
from moediag.recorder.parameter_names import ParameterNames

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
            missing = [
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                # In FSDP1, a parameter whose shard is on another rank is empty and has no gradient.
                if parameter.grad is None and parameter.requires_grad and parameter.numel()
            ]
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
        fqns = self._fqns(missing)
        names = recorder.log.names(tuple(fqns)) if fqns else "null"
        if names != "null":
            recorder.event("no_gradient", step=recorder.current_step, names=int(names))

    def _fqns(self, parameters: List[Any]) -> List[str]:
        known = [fqn for fqn in self._names.of(parameters) if fqn is not None]
        if len(known) < len(parameters):
            self._recorder.note_not_seen(
                "names of parameters without a gradient that belong to no module seen running"
            )
        return known
