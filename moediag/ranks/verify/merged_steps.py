"""Several steps of a program made into one: a process alone then sees in a step what several ranks
see together, where a sampler gives it their parts one after the other."""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Set

import torch
from torch.nn.utils import clip_grad

from moediag.recorder.step.hooks import StepHooks

_CLIP = ("clip_grad_norm_", "clip_grad_value_")


class MergedSteps:
    """Lets an optimizer step in every ``times``-th call only, with the mean of the gradients."""

    def __init__(self, times: int, hooks: StepHooks) -> None:
        self._times = times
        self._hooks = hooks
        self._calls: Dict[int, int] = {}  # id of an optimizer -> calls of its step
        self._keep: List[Any] = []  # those optimizers: ids stay theirs
        self._divided: Set[int] = set()  # ids of parameters whose gradient is a mean already

    def install(self) -> None:
        """Call it before the program makes an optimizer."""
        kind = torch.optim.Optimizer
        self._hooks.replace(kind, "profile_hook_step", self._hooked)
        self._hooks.replace(torch.optim.lr_scheduler.LRScheduler, "step", self._where_a_step_begins)
        for owner in (kind, torch.nn.Module):
            self._hooks.replace(owner, "zero_grad", self._where_a_step_begins)
        for place in (clip_grad, torch.nn.utils):
            for name in _CLIP:
                self._hooks.replace(place, name, self._where_a_step_ends)

    @property
    def _made(self) -> int:
        return max(self._calls.values(), default=0)

    def _hooked(self, original: Any) -> Any:
        make = getattr(original, "__func__", original)

        def profile_hook_step(function: Any) -> Any:
            hooked = make(function)

            @functools.wraps(hooked)
            def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                if id(optimizer) not in self._calls:
                    self._calls[id(optimizer)] = 0
                    self._keep.append(optimizer)
                self._calls[id(optimizer)] += 1
                if self._calls[id(optimizer)] % self._times:
                    return None
                self._divide([p for group in optimizer.param_groups for p in group["params"]])
                self._divided.clear()
                return hooked(optimizer, *args, **kwargs)

            return step

        return staticmethod(profile_hook_step)

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
            own = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self._divide(own)
            return original(own, *args, **kwargs)

        return clip

    def _divide(self, parameters: List[Any]) -> None:
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) not in self._divided:
                self._divided.add(id(parameter))
                parameter.grad.div_(self._times)
