"""Records whether gradients were ever cleared between two calls of an optimizer's ``step``: if not,
the second update uses the gradients of the first one again. Whether any backward came between the
two. And whether they also have those of a backward before another optimizer's update."""

from __future__ import annotations

import functools
import weakref
from itertools import islice
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

import torch

from moediag.recorder.laws.context import LawContext
from moediag.recorder.parameter_names import parameters_of
from moediag.recorder.step.numbers import capturing, in_a_mode
from moediag.recorder.step.pieces import GradientMark, distributed, local

WATCHER = "laws of cleared gradients"
_SAMPLE = 3  # parameters of a model that are followed
_MOST_ELEMENTS = 1 << 16  # of one of them


class _Followed:
    """A parameter between two steps."""

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter
        self.accumulated = False
        self.times = 0  # that autograd added to it
        self.cleared = False
        self.crossed = False  # another optimizer stepped since autograd first added to it
        self.other: Optional[GradientMark] = None  # a gradient of that one
        self.mixed = False  # after that autograd added to it again, and nothing had cleared it
        self.used = local(parameter.grad).clone()  # by the update
        self.mark = GradientMark(parameter)
        self.looked: Any = None  # the gradient of the last look
        self.handle: Any = None

    def begin(self, context: LawContext) -> bool:
        """Returns whether it is followed now: a program may switch parameters off until the forward
        that trains them.

        Hooks the node that adds to ``.grad``. A hook of the tensor itself would make torch.compile
        trace the program again. A node keeps the stream and the shape of its making, so it is made
        where the forward would make it: one from before may break the capture of a CUDA graph, and
        a parameter that the program gave another shape."""
        parameter = self.parameter
        if distributed(parameter) or not (parameter.is_leaf and parameter.requires_grad):
            return distributed(parameter)
        with torch.enable_grad():
            self.node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        look = functools.partial(context.guarded, WATCHER, self._adds)
        self.handle = self.node.register_prehook(look)
        return True

    def _adds(self, _gradients: Any) -> None:
        self.times += not capturing()
        self.look()

    def look(self) -> None:
        """A gradient may be added. What the program changed in between, as a momentum that it keeps
        by hand, is as good as cleared. What is captured is not looked at."""
        if capturing():
            return
        first, self.accumulated = not self.accumulated, True
        self.looked = self.parameter.grad
        gradient = None if self.looked is None else local(self.looked)
        if gradient is None or not bool(gradient.any()):
            self.cleared, self.crossed = True, False
        elif first and not torch.equal(gradient, self.used):
            self.cleared = True
        self.mixed = self.mixed or self.crossed

    def end(self) -> Optional[bool]:
        """Whether it was never cleared; None if nothing was added by autograd. A shard's last look
        may have been at the backward of another model, before the program cleared it."""
        if self.handle is not None:
            self.handle.remove()
        if distributed(self.parameter) and self.parameter.grad is not self.looked:
            self.cleared = True
        return None if not self.accumulated else not self.cleared

    def used_again(self) -> bool:
        """Whether the next update has the gradient of this one, to which no backward added."""
        return not self.accumulated and self.mark.unchanged()


class _Update(NamedTuple):
    """An update whose gradients are followed until the next one of its optimizer."""

    optimizer: Any  # a weak reference
    parts: List[List[_Followed]]  # by model
    step: int  # the training step


class ClearedGradients:
    """Follows gradients from one update of an optimizer to the next."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._updates: List[_Update] = []
        self._waiting: List[_Followed] = []  # for the next forward
        self._before: List[Any] = []  # parameters of the running update, and their values
        context.forward.add(WATCHER, self._forward, pending=self._waiting)
        context.before_backward.add(WATCHER, self._backward, pending=self._updates)
        context.before_step.add(WATCHER, self._end, pending=self._updates)
        context.before_step.add(WATCHER, self._remember)
        context.after_step.add(WATCHER, self._begin)
        context.recorder.on_uninstall.append(self._forget)

    def _followed(self) -> Iterator[_Followed]:
        return (one for update in self._updates for part in update.parts for one in part)

    def _begin(self, optimizer: Any) -> None:
        number = self._context.updates_of(optimizer)
        before, self._before = self._before, []
        if not self._context.is_checked(number) or capturing():
            return
        if before and all(torch.equal(local(p), value) for p, value in before):
            return  # it accumulates, and updates in another call
        models = [one() for _, one in self._context.recorder.roots]
        known = [self._context.parts(model) for model in models if model is not None]
        of = {id(p): number for number, model in enumerate(known) for p in model.parameters}
        parts: Dict[Any, List[_Followed]] = {}  # a program may clear one model of several
        for parameter in _sorted(optimizer):
            own = parts.setdefault(of.get(id(parameter)), [])
            if len(own) < _SAMPLE and _moves(parameter):
                own.append(_Followed(parameter))
        self._updates.append(
            _Update(
                weakref.ref(optimizer),
                [some for some in parts.values() if some],
                self._context.step,
            )
        )
        self._waiting += [one for part in parts.values() for one in part]

    def _forward(self, *_: Any) -> None:
        if not in_a_mode():
            self._waiting[:] = [one for one in self._waiting if not one.begin(self._context)]

    def _backward(self, _loss: Any) -> None:
        """FSDP2 itself adds to the gradients of shards, after autograd."""
        for one in self._followed():
            if distributed(one.parameter):
                one.look()

    def _end(self, optimizer: Any, closure: bool, frame: Any) -> None:
        ended = [update for update in self._updates if update.optimizer() is optimizer]
        others = [one for one in self._updates if one not in ended]
        self._updates[:] = [one for one in others if one.optimizer() is not None]
        for update in ended:
            self._tell(update, optimizer, closure, frame)
        used = _used(optimizer) if self._updates else None
        for one in self._followed():
            one.crossed = one.accumulated
            one.other = one.other if one.mixed else used

    def _remember(self, optimizer: Any, *_: Any) -> None:
        if self._context.is_checked(1 + self._context.updates_of(optimizer)) and not capturing():
            some = islice(filter(_moves, _sorted(optimizer)), _SAMPLE)
            self._before = [(p, local(p).clone()) for p in some]

    def _tell(self, update: _Update, optimizer: Any, closure: bool, frame: Any) -> None:
        for followed in update.parts:
            self._waiting[:] = [one for one in self._waiting if one not in followed]
            kept = [one.end() for one in followed]
            again = not closure and all(one.used_again() for one in followed)
            if None in kept and not again:
                continue
            self._context.log.event(
                "cleared", optimizer=type(optimizer).__name__, step=update.step,
                kept=all(kept), again=again, times=min(one.times for one in followed),
                crossed=all(one.mixed for one in followed) if followed[0].other else None,
                mixed=all(one.mixed and _untouched(one.other) for one in followed),
                names=self._context.names.of([one.parameter for one in followed]),
                line=self._context.line(frame),
            )  # fmt: skip

    def _forget(self) -> None:
        for one in self._followed():
            one.end()


def _sorted(optimizer: Any) -> List[Any]:
    """The parameters that can be followed, the smallest first."""
    return sorted(filter(_followed, parameters_of(optimizer)), key=lambda p: local(p).numel())


def _moves(parameter: Any) -> bool:
    """Whether its gradient tells anything: where the last layer begins with zeros, or the parameter
    has no influence, it is zeros in each step."""
    return bool(local(parameter.grad).any())


def _used(optimizer: Any) -> Optional[GradientMark]:
    """A gradient of the optimizer."""
    marks = (GradientMark(p) for p in parameters_of(optimizer) if type(p.grad) is torch.Tensor)
    return next(marks, None)


def _untouched(used: Optional[GradientMark]) -> bool:
    """Whether no backward added to a gradient since: one that trains both optimizers accumulates
    on purpose for the one that steps less often."""
    if used is None:
        return False
    now = used.parameter.grad
    return now is None or used.unchanged() or not bool(now.any())


def _followed(parameter: Any) -> bool:
    """Whether it is known when its gradient is added to: a plain tensor's by autograd, a shard's
    during the backward."""
    gradient = parameter.grad
    return (
        (type(parameter) in (torch.Tensor, torch.nn.Parameter) or distributed(parameter))
        and parameter.is_leaf
        and parameter.requires_grad
        and gradient is not None
        and gradient.layout is torch.strided
        and 0 < local(parameter).numel() <= _MOST_ELEMENTS
    )
