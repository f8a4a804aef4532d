"""Records whether gradients were ever cleared between two calls of an optimizer's ``step``: if not,
the second update uses the gradients of the first one again."""

from __future__ import annotations

import functools
import sys
from typing import Any, List, Optional

import torch
from torch.optim import optimizer as torch_optimizer

from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.fingerprints import capturing

WATCHER = "laws of cleared gradients"
_SAMPLE = 3  # parameters of an optimizer that are followed
_MOST_ELEMENTS = 1 << 20  # of one of them


class _Followed:
    """A parameter between two steps."""

    __slots__ = ("accumulated", "cleared", "handle", "node", "parameter")

    def __init__(self, parameter: Any, context: LawContext) -> None:
        self.parameter = parameter
        self.accumulated = False
        self.cleared = False
        # The node that adds to ``.grad``. A hook of the tensor itself would make torch.compile
        # trace the program again. The node keeps the stream and the shape of its making, so it is
        # made where the forward would make it: one from before may break the capture of a CUDA
        # graph, and a parameter that the program gave another shape.
        with torch.enable_grad():
            self.node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        look = functools.partial(context.guarded, WATCHER, self._look)
        self.handle = self.node.register_prehook(lambda _gradients: look())

    def _look(self) -> None:
        """A gradient is about to be added. What is captured as a CUDA graph is not known."""
        if capturing():
            return
        self.accumulated = True
        if not self.cleared:
            gradient = self.parameter.grad
            with torch.no_grad():
                self.cleared = gradient is None or not bool(gradient.any())

    def end(self) -> Optional[bool]:
        """Whether it was never cleared; None if nothing was added by autograd."""
        self.handle.remove()
        return None if not self.accumulated else not self.cleared


class _Between:
    """An optimizer after a checked step, until its next one."""

    __slots__ = ("ended", "followed", "parameters", "step")

    def __init__(self, step: int, parameters: List[Any]) -> None:
        self.step = step
        self.parameters = parameters
        self.followed: List[_Followed] = []
        self.ended = False

    def follow(self, context: LawContext) -> None:
        if not self.ended and all(p.is_leaf and p.requires_grad for p in self.parameters):
            self.followed = [_Followed(parameter, context) for parameter in self.parameters]

    def end(self) -> List[Optional[bool]]:
        """Of each parameter, whether its gradient was never cleared."""
        self.ended = True
        return [one.end() for one in self.followed]


class ClearedGradients:
    """Global hooks of optimizers, before and after a step."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._open = ByObject()  # optimizer -> _Between or None
        self._calls = ByObject()  # optimizer -> calls of step() so far

    def install(self) -> None:
        guarded = self._context.guarded

        def before(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            guarded(WATCHER, self._end, optimizer, sys._getframe(1))

        def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            guarded(WATCHER, self._begin, optimizer)

        for hook in (
            torch_optimizer.register_optimizer_step_pre_hook(before),
            torch_optimizer.register_optimizer_step_post_hook(after),
        ):
            self._context.recorder.on_uninstall.append(hook.remove)
        self._context.recorder.on_uninstall.append(self._forget)

    def _begin(self, optimizer: Any) -> None:
        calls = self._calls.get(optimizer) or 0
        self._calls.set(optimizer, calls + 1)
        if not self._context.is_checked(calls + 1) or capturing():
            return
        chosen = sorted(
            (p for group in optimizer.param_groups for p in group["params"] if _plain(p)),
            key=lambda p: p.numel(),
        )[:_SAMPLE]
        if chosen:
            between = _Between(self._context.recorder.current_step, chosen)
            self._open.set(optimizer, between)
            self._context.at_next_forward.append(
                functools.partial(self._context.guarded, WATCHER, between.follow, self._context)
            )

    def _end(self, optimizer: Any, frame: Any) -> None:
        between = self._open.get(optimizer)
        if between is None:
            return
        self._open.set(optimizer, None)
        kept = between.end()
        if kept and None not in kept:
            self._context.log.event(
                "cleared", optimizer=type(optimizer).__name__, step=between.step, kept=all(kept),
                names=self._context.names.of(between.parameters),
                line=self._context.recorder.user_lines.innermost(frame),
            )  # fmt: skip

    def _forget(self) -> None:
        for optimizer in self._open.owners():
            between = self._open.get(optimizer)
            if between is not None:
                between.end()


def _plain(parameter: Any) -> bool:
    """Whether autograd itself adds to its gradient, and has done so."""
    gradient = parameter.grad
    return (
        type(parameter) in (torch.Tensor, torch.nn.Parameter)
        and parameter.is_leaf
        and parameter.requires_grad
        and gradient is not None
        and gradient.layout is torch.strided
        and 0 < parameter.numel() <= _MOST_ELEMENTS
    )
