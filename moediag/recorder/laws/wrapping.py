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
from typing import Any, Dict, List, Set, Tuple

import torch

from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.replica_sets import unreduced
from moediag.recorder.modules import Hook, unwrapped
from moediag.recorder.parameter_names import parameters_of

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
        self._asked: Dict[str, Any] = {"backwards": 0, "entered": False, "twice": False, "line": ""}
        self._hooked = False
        self._sent: Set[int] = set()  # units of FSDP2 that had a gradient in an update
        context.sets.on_wrapped.append(self._wrapped)
        context.before_step.add(WATCHER, self._stepped)
        context.before_backward.add(WATCHER, self._backward)
        for name, make in (
            ("prepare_model", context.around(WATCHER, after=self._prepared)),
            ("backward", context.around(WATCHER, self._divided)),
            ("accumulate", context.around(WATCHER, lambda *_: self._asked.update(entered=True))),
        ):
            context.replace_late(_ACCELERATOR, "Accelerator", name, make)
        engine = context.around(WATCHER, self._divided_by_engine)
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
            self._asked["line"] = self._context.line(frame)

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
            running = type(wrapper)._active_ddp_module is not None
            again = torch._C._current_graph_task_id() != -1
            if module.training and torch.is_grad_enabled() and not (running or again):
                handle.pop("it").remove()
                self._recorder.look_for_models()  # its calls are steps from now on
                self._context.event("bare", keep=True, line=self._context.line(sys._getframe(1)))

        def called(_recorder: Any, module: Any, _args: Any) -> None:
            training = torch.is_grad_enabled() and module.module.training
            if training and len(self._calls) < _MOST_CALLS:
                self._calls.append(bool(module.require_backward_grad_sync))

        outer = ddp.register_forward_pre_hook(Hook(called))
        self._recorder.on_uninstall.append(outer.remove)
        handle["it"] = ddp.module.register_forward_pre_hook(Hook(before))
        self._recorder.on_uninstall.append(lambda: handle["it"].remove() if handle else None)

    def _backward(self, loss: Any) -> None:
        by = self._asked.get("micro_batches", 1) if self._context.checking else 1
        self._asked["twice"] = by > 1 and _divided_twice(loss, by)
        calls, self._calls = self._calls, []
        if calls and len(self._backwards) < _MOST_CALLS:
            self._backwards.append(any(calls))

    def _stepped(self, optimizer: Any, closure: bool, frame: Any) -> None:
        """``closure``: it makes the last backward of the update, later."""
        checking = self._context.checking
        if not self._hooked and checking and self._context.sets.hooked():
            self._hooked = True
            self._context.event("hooked", keep=True)
        made, calls = self._backwards, self._backwards + self._calls
        self._calls, self._backwards = [], []
        if checking and any(calls) and not all(calls):
            self._context.event("unsynced", calls=calls)
        kind = "unreduced" if calls and not any(calls) else ""
        last = any(made) and not made[-1] and len(self._context.sets.wrapped()) == 1
        keeps, unsent = self._kept(optimizer) if checking else (False, False)
        if (keeps or last) and not closure:
            kind = "late"
        elif not kind and unsent:
            kind = "unsent"
        if kind:
            self._updates[kind] += 1
            if self._updates[kind] == (1 if kind == "unreduced" else _ENOUGH):
                self._context.event(kind, keep=True, line=self._context.line(frame), keeps=keeps)

    def _kept(self, optimizer: Any) -> Tuple[bool, bool]:
        """Whether units of FSDP2 whose parameters this update has keep gradients that they did not
        reduce: some that have gradients for the update; some that never had any in a checked step,
        beside others that had."""
        owned, keeps, unsent = {*map(id, parameters_of(optimizer))}, False, False
        for group in self._recorder.fsdp2_groups():
            shards = [one.sharded_param for one in group.fsdp_params]
            with_gradients = [p for p in shards if p.grad is not None]
            if not owned.isdisjoint(map(id, shards)):
                self._sent.update([id(group)] if with_gradients else [])
                if unreduced(group):
                    keeps = keeps or not owned.isdisjoint(map(id, with_gradients))
                    unsent = unsent or id(group) not in self._sent
        return keeps, unsent and bool(self._sent)

    def _prepared(
        self, frame: Any, model: Any, accelerator: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Whether accelerate trains replicas and returned one that nothing keeps equal."""
        if args[2:3] == (True,) or kwargs.get("evaluation_mode", False):
            return
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        plain = all(type(p.data) is torch.Tensor for p in model.parameters())
        trained = any(p.requires_grad for p in model.parameters())
        wrapped = any(hasattr(one, "module") for one in (model, getattr(model, "_orig_mod", model)))
        replicas = kind in _DATA_PARALLEL and accelerator.num_processes > 1 and plain and trained
        if replicas and not wrapped and not hasattr(model, "_fsdp_state"):
            line = self._context.line(frame)
            self._context.log.event("unwrapped", keep=True, model=type(model).__name__, line=line)


def _divided_twice(loss: Any, by: int) -> bool:
    """Whether the last operations that made a loss are two divisions by the same number."""
    node = getattr(loss, "grad_fn", None)
    for _ in range(2):
        divisor: Any = getattr(node, "_saved_other", None)
        one = type(node).__name__.startswith("Div") and getattr(divisor, "numel", int)() == 1
        if not one or float(divisor) != by:
            return False
        node = node.next_functions[0][0]  # type: ignore[union-attr]
    return True


def _takes_no_autocast(accelerator: Any) -> bool:
    """Whether accelerate is asked for mixed precision, and a model of float32 that it prepared has
    no longer the forward that enters autocast."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    asked = getattr(accelerator, "native_amp", False) and kind in (*_DATA_PARALLEL, "NO")
    models = map(unwrapped, accelerator._models if asked else ())
    lost = (model for model in models if "_original_forward" not in vars(model))
    return any(p.requires_grad and p.dtype == torch.float32 for m in lost for p in m.parameters())
