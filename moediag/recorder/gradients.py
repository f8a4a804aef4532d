"""Parameters whose gradient never came: those whose ``.grad`` is None when the optimizer steps."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from torch.optim import optimizer as torch_optimizer

from moediag.recorder.core import Recorder
from moediag.recorder.modules import clean

WATCHER = "gradients"


class Gradients:
    """Global optimizer hooks: they see every optimizer, wrapped or not."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._names: Dict[int, str] = {}  # id(parameter) -> FQN
        self._roots = -1  # how many roots the names were read from
        self._interned: Dict[Tuple[int, ...], str] = {}

    def install(self) -> None:
        before = torch_optimizer.register_optimizer_step_pre_hook(self._before)
        after = torch_optimizer.register_optimizer_step_post_hook(self._after)
        self._recorder.on_uninstall += [before.remove, after.remove]

    def _before(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        recorder = self._recorder
        if not recorder.active:
            return
        try:
            recorder.flush()
            missing = [
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                # FSDP1 leaves a parameter whose shard is elsewhere empty and without gradient.
                if parameter.requires_grad and parameter.grad is None and parameter.numel()
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
        key = tuple(map(id, missing))
        names = self._interned.get(key)
        if names is None:
            fqns = self._fqns(missing)
            if not fqns:
                return
            if len(self._interned) > 1000:
                self._interned.clear()
            names = self._interned[key] = recorder.log.names(tuple(fqns))
        if names != "null":
            recorder.event("no_gradient", step=recorder.current_step, names=int(names))

    def _fqns(self, parameters: List[Any]) -> List[str]:
        recorder = self._recorder
        if self._roots != len(recorder.roots) or any(id(p) not in self._names for p in parameters):
            self._roots = len(recorder.roots)
            for prefix, reference in recorder.roots:
                root = reference()
                for name, parameter in root.named_parameters() if root is not None else ():
                    self._names.setdefault(id(parameter), clean(prefix + name))
        known = [self._names[id(p)] for p in parameters if id(p) in self._names]
        if len(known) < len(parameters):
            recorder.note_not_seen(
                "names of parameters without a gradient that belong to no module seen running"
            )
        return known
