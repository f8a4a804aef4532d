"""Several steps of a program made into one: a process alone then sees in a step what several ranks
see together, where a sampler gives it their parts one after the other."""

from __future__ import annotations

import functools
from typing import Any, Dict, List

import torch
from torch.nn.utils import clip_grad

from moediag.recorder.core import ByObject
from moediag.recorder.step.hooks import StepHooks

_CLIP = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


class MergedSteps:
    """Lets an optimizer step in every ``times``-th call only, with the mean of the gradients. What
    the program does to gradients before a step that is left out, such as clipping, is undone."""

    def __init__(self, times: int, hooks: StepHooks) -> None:
        self._times = times
        self._hooks = hooks
        self._calls: Dict[int, int] = {}  # id of an optimizer -> calls of its step
        self._optimizers: List[Any] = []  # ids stay theirs
        self._gradients = ByObject()  # parameter -> its gradient after the last backward

    def install(self) -> None:
        """Call it before the program makes an optimizer, after what looks at clipping."""
        kind = torch.optim.Optimizer
        self._hooks.replace(kind, "__init__", self._made_optimizer)
        self._hooks.replace(kind, "profile_hook_step", self._hooked)
        self._hooks.replace(torch.autograd, "backward", self._divided)
        self._hooks.replace(torch.optim.lr_scheduler.LRScheduler, "step", self._where_a_step_begins)
        for owner in (kind, torch.nn.Module):
            self._hooks.replace(owner, "zero_grad", self._where_a_step_begins)
        for place in (clip_grad, torch.nn.utils):
            for name in _CLIP:
                self._hooks.replace(place, name, self._where_a_step_ends)

    @property
    def _made(self) -> int:
        return max(self._calls.values(), default=0)

    def _made_optimizer(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._calls.setdefault(id(optimizer), 0)
            self._optimizers.append(optimizer)

        return __init__

    def _hooked(self, original: Any) -> Any:
        make = getattr(original, "__func__", original)

        def profile_hook_step(function: Any) -> Any:
            hooked = make(function)

            @functools.wraps(hooked)
            def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                self._calls[id(optimizer)] = self._calls.get(id(optimizer), 0) + 1
                if self._calls[id(optimizer)] % self._times:
                    self._restore(optimizer)
                    return None
                return hooked(optimizer, *args, **kwargs)

            return step

        return staticmethod(profile_hook_step)

    def _divided(self, original: Any) -> Any:
        """Divides what a backward begins with: gradients add up to their mean."""

        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            inside = torch._C._current_graph_task_id() != -1  # a checkpoint's, in another one
            if not inside:
                every = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
                several = isinstance(grad_tensors, (list, tuple))
                begin = list(grad_tensors) if several else [grad_tensors] * len(every)
                for at, (tensor, one) in enumerate(zip(every, begin)):  # noqa: B905 - Python 3.9
                    if one is not None or tensor.numel() == 1:  # torch refuses others
                        begin[at] = (torch.ones_like(tensor) if one is None else one) / self._times
                tensors, grad_tensors = every, begin
            original(tensors, grad_tensors, *args, **kwargs)
            if not inside and (self._made + 1) % self._times:
                self._keep()

        return backward

    def _keep(self) -> None:
        for parameter in (p for one in self._optimizers for p in _parameters(one)):
            if parameter.grad is not None:
                self._gradients.set(parameter, parameter.grad.detach().clone())

    def _restore(self, optimizer: Any) -> None:
        for parameter in _parameters(optimizer):
            kept = self._gradients.get(parameter)
            if kept is not None and parameter.grad is not None:
                parameter.grad.copy_(kept)

    def _where_a_step_begins(self, original: Any) -> Any:
        @functools.wraps(original)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            return None if self._made % self._times else original(owner, *args, **kwargs)

        return zero_grad

    def _where_a_step_ends(self, original: Any) -> Any:
        @functools.wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if (self._made + 1) % self._times:
                return torch.zeros(())
            return original(parameters, *args, **kwargs)

        return clip


def _parameters(optimizer: Any) -> List[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]
