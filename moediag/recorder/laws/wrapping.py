"""Records how a program uses wrappers: a wrapped model that is called without its wrapper, updates
without any backward outside of no_sync or whose last one was inside, units of FSDP2 whose gradients
are never reduced, a model that accelerate returned without a wrapper, and an accumulation that it
was asked for.

unsynced       step calls[of the wrapper for an update, whether its gradients are reduced], if some
               are not
hooked         a communication hook takes the place of a wrapper's reduction
accumulation   step micro_batches(by which accelerate or DeepSpeed divides a loss) by(which of
               them) backwards(its own since the update before) line(the user's)
               entered(whether `accumulate` ever was)
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Dict, List, Set

import torch

from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.replica_sets import unreduced
from moediag.recorder.modules import Hook, unwrapped

WATCHER = "laws"
_MOST_CALLS = 1000  # of a wrapper for one update
_ENOUGH = 2  # updates
_ACCELERATOR = "accelerate.accelerator"
_ENGINE = "deepspeed.runtime.engine"
_DATA_PARALLEL = ("MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU", "MULTI_MLU")


class Wrapping:
    """Writes an event for the first of each."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._recorder = context.recorder
        # Whether gradients are reduced, of the calls of wrappers since the last backward, and of
        # the backwards since the last update: one reduces if any of its calls asked for it.
        self._calls: List[bool] = []
        self._backwards: List[bool] = []
        self._updates = {"unreduced": 0, "late": 0, "unsent": 0}
        self._asked: Dict[str, Any] = {"backwards": 0, "entered": False, "line": ""}
        self._hooked = False
        self._sent: Set[int] = set()  # units of FSDP2 that had a gradient in an update

    def install(self) -> None:
        context = self._context
        context.sets.on_wrapped.append(self._wrapped)
        context.before_step.add(WATCHER, self._stepped)
        context.before_backward.add(WATCHER, self._backward)
        for name, make in (
            ("prepare_model", self._preparing),
            ("backward", context.first(WATCHER, self._divided)),
            ("accumulate", context.first(WATCHER, lambda *_: self._asked.update(entered=True))),
        ):
            context.replace_late(_ACCELERATOR, "Accelerator", name, make)
        engine = context.first(WATCHER, self._divided_by_engine)
        context.replace_late(_ENGINE, "DeepSpeedEngine", "backward", engine)
        context.on_step.append(self._accumulates)
        context.after_step.add(WATCHER, lambda _: self._asked.update(backwards=0))

    def _divided(self, accelerator: Any, frame: Any) -> None:
        if getattr(accelerator, "deepspeed_engine_wrapped", None) is None:
            self._count("accelerate", int(accelerator.gradient_accumulation_steps), frame)
            if self._context.checking and _takes_no_autocast(accelerator):
                self._context.settings["autocast of accelerate = removed"] = 1, ""

    def _divided_by_engine(self, engine: Any, frame: Any) -> None:
        self._count("DeepSpeed", int(engine.gradient_accumulation_steps()), frame)

    def _count(self, by: str, micro_batches: int, frame: Any) -> None:
        self._asked["backwards"] += 1
        self._asked.update(micro_batches=micro_batches, by=by)
        if self._context.checking:
            self._asked["line"] = self._recorder.user_lines.innermost(frame)

    def _accumulates(self, step: int) -> None:
        if self._asked["backwards"] and self._asked["micro_batches"] > 1:
            self._context.log.event("accumulation", step=step, **self._asked)

    def _wrapped(self, ddp: Any) -> None:
        self._recorder.look_for_models()
        handle: Dict[str, Any] = {}
        known = weakref.ref(ddp)  # its hooks do not keep it alive

        def before(_recorder: Any, module: Any, _args: Any) -> None:
            wrapper = known()
            if wrapper is None or module is not wrapper.module:
                return  # a copy, which has the hooks of the original
            bare = (
                type(wrapper)._active_ddp_module is None and torch._C._current_graph_task_id() == -1
            )
            if bare and torch.is_grad_enabled() and module.training:
                handle.pop("it").remove()
                self._recorder.look_for_models()  # its calls are steps from now on
                line = self._recorder.user_lines.innermost(sys._getframe(1))
                step = self._recorder.current_step
                self._context.log.event("bare", keep=True, step=step, line=line)

        def called(_recorder: Any, module: Any, _args: Any) -> None:
            if (
                torch.is_grad_enabled()
                and module.module.training
                and len(self._calls) < _MOST_CALLS
            ):
                self._calls.append(bool(module.require_backward_grad_sync))

        outer = ddp.register_forward_pre_hook(Hook(called))
        self._recorder.on_uninstall.append(outer.remove)
        handle["it"] = ddp.module.register_forward_pre_hook(Hook(before))
        self._recorder.on_uninstall.append(lambda: handle["it"].remove() if handle else None)

    def _backward(self, _loss: Any) -> None:
        calls, self._calls = self._calls, []
        if calls and len(self._backwards) < _MOST_CALLS:
            self._backwards.append(any(calls))

    def _stepped(self, optimizer: Any, closure: bool, frame: Any) -> None:
        """``closure``: it makes the last backward of the update, later."""
        if not self._hooked and self._context.checking and self._context.sets.hooked():
            self._hooked = True
            self._context.log.event("hooked", keep=True, step=self._recorder.current_step)
        made, calls = self._backwards, self._backwards + self._calls
        self._calls, self._backwards = [], []
        if self._context.checking and any(calls) and not all(calls):
            step = self._recorder.current_step
            self._context.log.event("unsynced", step=step, calls=calls)
        kind = "unreduced" if calls and not any(calls) else ""
        last = any(made) and not made[-1] and len(self._context.sets.wrapped()) == 1
        keeps = not closure and self._context.checking and self._keeps(optimizer)
        if keeps or (last and not closure):
            kind = "late"
        elif not kind and self._context.checking and self._unsent(optimizer):
            kind = "unsent"
        if kind:
            self._updates[kind] += 1
            if self._updates[kind] == (1 if kind == "unreduced" else _ENOUGH):
                line = self._recorder.user_lines.innermost(frame)
                self._context.log.event(
                    kind, keep=True, step=self._recorder.current_step, line=line, keeps=keeps
                )

    def _keeps(self, optimizer: Any) -> bool:
        """Whether FSDP2 has gradients for this update, and others that it did not reduce."""
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return any(
            id(one.sharded_param) in owned and one.sharded_param.grad is not None
            for group in filter(unreduced, self._recorder.fsdp2_groups())
            for one in group.fsdp_params
        )

    def _unsent(self, optimizer: Any) -> bool:
        """Whether units of FSDP2 whose parameters this update has keep gradients that were never
        reduced in a checked step, beside others that were."""
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        kept = False
        for group in self._recorder.fsdp2_groups():
            shards = [one.sharded_param for one in group.fsdp_params]
            if any(id(one) in owned for one in shards):
                if any(one.grad is not None for one in shards):
                    self._sent.add(id(group))
                kept = kept or (unreduced(group) and id(group) not in self._sent)
        return kept and bool(self._sent)

    def _preparing(self, prepare_model: Any) -> Any:
        context = self._context

        def prepare(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            found = prepare_model(self, model, *args, **kwargs)
            if not (args[1:2] == (True,) or kwargs.get("evaluation_mode", False)):  # evaluates
                context.guarded(WATCHER, _tell_unwrapped, context, self, found)
            return found

        return prepare


def _takes_no_autocast(accelerator: Any) -> bool:
    """Whether accelerate is asked for mixed precision, and a model of float32 that it prepared has
    no longer the forward that enters autocast."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if not getattr(accelerator, "native_amp", False) or kind not in (*_DATA_PARALLEL, "NO"):
        return False
    models = map(unwrapped, getattr(accelerator, "_models", ()))
    return any(
        p.requires_grad and p.dtype == torch.float32
        for model in models
        if "_original_forward" not in vars(model)
        for p in model.parameters()
    )


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
