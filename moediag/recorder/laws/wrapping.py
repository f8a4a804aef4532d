"""Records how a program uses wrappers: a wrapped model that is called without its wrapper, or only
inside ``no_sync``, and one that accelerate returned without one."""

from __future__ import annotations

import functools
import sys
from typing import Any, Dict, Tuple

import torch

from moediag.recorder.late_imports import when_imported
from moediag.recorder.laws.context import LawContext
from moediag.recorder.modules import Hook

WATCHER = "laws"
_ACCELERATOR = "accelerate.accelerator"
_DATA_PARALLEL = ("MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU", "MULTI_MLU")


class Wrapping:
    """Writes an event for the first of each."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._recorder = context.recorder
        self._calls: Dict[int, Tuple[bool, str]] = {}  # id of a wrapper -> see _called
        self._told = False

    def install(self) -> None:
        self._context.sets.on_wrapped.append(self._wrapped)
        called = functools.partial(self._context.guarded, WATCHER, self._called)
        self._recorder.on_forward.append(called)
        self._context.on_check.append(self._unsynced)
        self._recorder.hooks.after_step(lambda _: self._calls.clear())
        self._recorder.on_uninstall.append(when_imported(_ACCELERATOR, self._watch_accelerate))

    def _wrapped(self, ddp: Any) -> None:
        self._recorder.look_for_models()
        handle: Dict[str, Any] = {}

        def before(_recorder: Any, module: Any, _args: Any) -> None:
            bare = type(ddp)._active_ddp_module is None and torch._C._current_graph_task_id() == -1
            if bare and torch.is_grad_enabled() and module.training:
                handle.pop("it").remove()
                self._recorder.look_for_models()  # its calls are steps from now on
                line = self._recorder.user_lines.innermost(sys._getframe(1))
                step = self._recorder.current_step
                self._context.log.event("bare", keep=True, step=step, line=line)

        handle["it"] = ddp.module.register_forward_pre_hook(Hook(before))
        self._recorder.on_uninstall.append(lambda: handle["it"].remove() if handle else None)

    def _called(self, root: Any, *_: Any) -> None:
        """Notes whether a call of a wrapper since the last update reduces gradients, and the line
        of the last one."""
        if not self._told and hasattr(root, "require_backward_grad_sync"):
            reduces, line = self._calls.get(id(root), (False, ""))
            if self._context.checking:
                line = self._recorder.user_lines.innermost(sys._getframe(1))
            self._calls[id(root)] = reduces or root.require_backward_grad_sync, line

    def _unsynced(self, step: int) -> None:
        """Tells of an update for which no backward reduced gradients."""
        lines = [line for reduces, line in self._calls.values() if not reduces]
        if lines and not self._told:
            self._told = True
            self._context.log.event("unsynced", keep=True, step=step, line=lines[0])

    def _watch_accelerate(self) -> None:
        context = self._context

        def make(prepare_model: Any) -> Any:
            def prepare(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
                found = prepare_model(self, model, *args, **kwargs)
                evaluates = args[1:2] == (True,) or kwargs.get("evaluation_mode", False)
                if not evaluates:
                    context.guarded(WATCHER, _tell_unwrapped, context, self, found)
                return found

            return prepare

        kind = sys.modules[_ACCELERATOR].Accelerator
        self._recorder.patches.replace(kind, "prepare_model", make)


def _tell_unwrapped(context: LawContext, accelerator: Any, model: Any) -> None:
    """Whether accelerate trains replicas and returned one that nothing keeps equal."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    plain = all(type(p.data) is torch.Tensor for p in model.parameters())
    trained = any(p.requires_grad for p in model.parameters())
    wrapped = any(hasattr(one, "module") for one in (model, getattr(model, "_orig_mod", model)))
    replicas = kind in _DATA_PARALLEL and accelerator.num_processes > 1 and plain and trained
    if replicas and not wrapped and not hasattr(model, "_fsdp_state"):
        line = context.recorder.user_lines.innermost(sys._getframe(3))
        context.log.event("unwrapped", keep=True, model=type(model).__name__, line=line)
