"""The hooks of a training step, in its order: forward, backward, clipping, update. Laws, ``verify``
and the recorder register theirs here."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, Iterator, List, Optional

import torch
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer

from moediag.recorder.late_imports import when_imported
from moediag.recorder.patches import Patches

# Every function of torch.nn.utils that clips by a norm calls one of these.
_SCALE = ("_clip_grads_with_norm_", "clip_grads_with_norm_")


class StepHooks:
    """The hooks of one instrument. They run in the order in which they were registered and handle
    their own errors."""

    def __init__(self, patches: Optional[Patches] = None) -> None:
        self._patches = patches or Patches()
        self._handles: List[Any] = []
        self._before_backward: List[Callable[[Any], None]] = []
        self._after_backward: List[Callable[[], None]] = []
        self._before_step: List[Callable[[Any, bool, Any], None]] = []
        self._after_step: List[Callable[[Any], None]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """Sets ``owner.name`` to ``make(current value)`` until :meth:`remove`; returns False
        without such an attribute."""
        return self._patches.replace(owner, name, make)

    def when_imported(self, module: str, act: Callable[[], None]) -> None:
        """Calls ``act`` once ``module`` is imported; ``act`` must not raise."""
        when_imported(module, act)

    def around_forward(
        self,
        wanted: Callable[[Any], bool],
        before: Callable[[Any, Any, Any], Any],
        after: Callable[[Any, Any], None],
        inside: Callable[[Any, Any, Any, Any], None],
    ) -> None:
        """Of each outermost call of a module that ``wanted(module)`` accepts, calls ``value =
        before(module, args, kwargs)`` and ``after(value, result)``, and in between
        ``inside(module, args, kwargs, result)`` after the call of every module in it.

        It costs something in every call of every module; a recorded job uses
        :attr:`moediag.recorder.core.Recorder.on_forward`."""
        running = False

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal running
                if torch.compiler.is_compiling():
                    return original(module, *args, **kwargs)
                if running or not wanted(module):
                    result = original(module, *args, **kwargs)
                    if running:
                        inside(module, args, kwargs, result)
                    return result
                running = True
                try:
                    value = before(module, args, kwargs)
                    result = original(module, *args, **kwargs)
                    after(value, result)
                    return result
                finally:
                    running = False

            return __call__

        self._patches.replace(torch.nn.Module, "__call__", make)

    def before_backward(self, act: Callable[[Any], None]) -> None:
        """Calls ``act(loss)`` before ``loss.backward()``."""
        self._watch_backward()
        self._before_backward.append(act)

    def after_backward(self, act: Callable[[], None]) -> None:
        """Calls ``act()`` after ``loss.backward()``."""
        self._watch_backward()
        self._after_backward.append(act)

    def _watch_backward(self) -> None:
        before, after = self._before_backward, self._after_backward
        if before or after:
            return

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                for act in before:
                    act(tensor)
                result = original(tensor, *args, **kwargs)
                for done in after:
                    done()
                return result

            return backward

        self._patches.replace(torch.Tensor, "backward", make)

    def before_clipping(self, act: Callable[[List[Any], Any, Any, Any], None]) -> bool:
        """Calls ``act(parameters, max_norm, norm, frame)`` before torch scales gradients to a norm;
        ``frame``: of the caller. Returns whether this torch has a function for it."""

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def scale(
                parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any
            ) -> Any:
                if not torch.compiler.is_compiling():
                    single = isinstance(parameters, torch.Tensor)
                    parameters = [parameters] if single else list(parameters)
                    act(parameters, max_norm, total_norm, sys._getframe(1))
                return original(parameters, max_norm, total_norm, *args, **kwargs)

            return scale

        places = [(place, name) for place in (clip_grad, torch.nn.utils) for name in _SCALE]
        replaced = [self._patches.replace(place, name, make) for place, name in places]
        return any(replaced)

    def before_step(self, act: Callable[[Any, bool, Any], None]) -> None:
        """Calls ``act(optimizer, closure, frame)`` before every optimizer's update, wrapped or not.
        ``closure``: it computes the gradients inside ``step()``; ``frame``: of the caller."""
        acts = self._before_step

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
            frame = sys._getframe(1)
            for each in acts:
                each(optimizer, closure, frame)

        if not acts:
            self._handles.append(torch_optimizer.register_optimizer_step_pre_hook(before))
        acts.append(act)

    def after_step(self, act: Callable[[Any], None]) -> None:
        """Calls ``act(optimizer)`` after every optimizer's update."""
        acts = self._after_step

        def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            for each in acts:
                each(optimizer)

        if not acts:
            self._handles.append(torch_optimizer.register_optimizer_step_post_hook(after))
        acts.append(act)

    def remove(self) -> None:
        """Removes all hooks, and restores the attributes of torch that ``patches`` replaced."""
        while self._handles:
            self._handles.pop().remove()
        self._patches.restore()
        # What other code has replaced since is not restored.
        self._before_backward.clear()
        self._after_backward.clear()


def clipping(
    before: Callable[[Any], Any], after: Callable[[Any, Any, Any, Any], None]
) -> Callable[[Any], Any]:
    """Wraps ``clip_grad_norm_(given, max_norm, ...)``, FSDP1's method or DeepSpeed's function of
    ``parameters``: calls ``value = before(given)`` and, unless that is None, ``after(value,
    max_norm, norm, frame)``; ``frame``: of the caller."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(parameters, Iterator):
                parameters = list(parameters)
            value = before(parameters)
            norm = original(parameters, *args, **kwargs)
            if value is not None:
                after(value, args[0] if args else kwargs["max_norm"], norm, sys._getframe(1))
            return norm

        return clip_grad_norm_

    return make
