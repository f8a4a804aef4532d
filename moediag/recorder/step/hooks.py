"""The hooks of a training step: the only module that registers them in torch."""

from __future__ import annotations

import sys
from typing import Any, Callable, List

from torch.optim import optimizer as torch_optimizer


class StepHooks:
    """The hooks of one instrument. They run in the order in which they were registered and handle
    their own errors."""

    def __init__(self) -> None:
        self._handles: List[Any] = []

    def before_step(self, act: Callable[[Any, bool, Any], None]) -> None:
        """Calls ``act(optimizer, closure, frame)`` before every optimizer's update, wrapped or not.
        ``closure``: it computes the gradients inside ``step()``; ``frame``: of the caller."""

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            closure = len(args) > 1 or kwargs.get("closure") is not None
            act(optimizer, closure, sys._getframe(1))

        self._handles.append(torch_optimizer.register_optimizer_step_pre_hook(before))

    def after_step(self, act: Callable[[Any], None]) -> None:
        """Calls ``act(optimizer)`` after every optimizer's update."""

        def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            act(optimizer)

        self._handles.append(torch_optimizer.register_optimizer_step_post_hook(after))

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
