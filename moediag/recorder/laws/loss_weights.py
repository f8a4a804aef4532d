"""Records, at checked steps, how much each token counts in the gradient: of each cross entropy the
targets that count, and the gradient that its result gets in the backward.

losses      step line(the user's that computed the last one) changed(how often a gradient was
            changed in place after the last backward; -1: replaced) backwards[{
            direct(bool: the loss is made of cross entropies and constants alone)
            added(bool: parameters had gradients before it)
            of[[targets that count, all targets, classes, sum of the tokens' weights, the smallest
            and the largest weight]]}]
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Dict, List, Tuple

import torch
from torch.jit import _builtins

from moediag.recorder.laws.context import LawContext
from moediag.recorder.step.numbers import capturing

WATCHER = "laws of losses"
_MOST = 64  # of one step
_SMALL = 1 << 16  # elements of a parameter that is read
_MOST_NODES = 256  # of the graph of a loss
# Functions that torch.jit knows by their id, which no other object may get.
_kept: List[Any] = []
_CROSS_ENTROPY = ("NllLoss", "CrossEntropyLoss")
_ARGUMENTS = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
_REDUCTIONS = ("none", "mean", "sum")  # by torch's number
# Nodes of autograd that add, or multiply by a constant; the last one is of a wrapper and copies.
_LINEAR = (
    "Add", "Clone", "Div", "Index", "MaskedSelect", "Mean", "Mul", "Neg", "Reshape", "Select",
    "Squeeze", "Stack", "Sum", "ToCopy", "UnsafeView", "Unsqueeze", "View", "_DDPSink",
)  # fmt: skip


class _Loss:
    """One call of cross_entropy or nll_loss."""

    def __init__(self, given: Any, target: Any, ignored: int, reduction: str) -> None:
        self.reduction = reduction
        self.valid = target.detach() != ignored
        self.shape = target.numel(), given.shape[1] if given.dim() > 1 else given.shape[0]
        self.weights: Any = None  # sum, smallest, largest

    def got(self, gradient: Any) -> None:
        """The gradient of its result."""
        with torch.no_grad():
            gradient = gradient.detach().double()
            if self.reduction == "none":
                own = gradient[self.valid] if gradient.shape == self.valid.shape else gradient[:0]
                if own.numel():
                    self.weights = torch.stack((own.sum(), own.min(), own.max()))
                return
            count = self.valid.sum().double()
            each = gradient / count if self.reduction == "mean" else gradient
            self.weights = torch.stack((each * count, each, each))

    def read(self) -> List[float]:
        return [int(self.valid.sum()), *self.shape, *self.weights.tolist()]


class LossWeights:
    """Follows the cross entropies of a step."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._step = 0
        self._line = ""
        self._new: List[_Loss] = []  # since the last backward
        self._backwards: List[Tuple[Dict[str, bool], List[_Loss]]] = []
        self._after: Tuple[Any, Any, int] = None, None, 0  # a parameter, its gradient and version

    def install(self) -> None:
        recorder, guarded = self._context.recorder, self._context.guarded
        # All cross entropies of torch.nn end in the first one, those of log probabilities in the
        # second one. torch.jit.script compiles what it does not know to be a function of torch's.
        for name in ("cross_entropy_loss", "nll_loss_nd"):
            recorder.patches.replace(torch._C._nn, name, self._wrapped)
            _builtins._register_builtin(getattr(torch._C._nn, name), f"aten::{name}")
            _kept.append(getattr(torch._C._nn, name))
        recorder.hooks.before_backward(functools.partial(guarded, WATCHER, self._backward))
        recorder.hooks.after_backward(functools.partial(guarded, WATCHER, self._made))
        self._context.on_check.append(self._write)

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def loss(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not torch.compiler.is_compiling() and self._context.checking:
                frame = sys._getframe(1)
                self._context.guarded(WATCHER, self._called, result, args, kwargs, frame)
            return result

        return loss

    def _called(
        self, result: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any], frame: Any
    ) -> None:
        given = {**dict(zip(_ARGUMENTS, args)), **kwargs}  # noqa: B905 - Python 3.9
        logits, target = given["input"], given["target"]
        again = torch._C._current_graph_task_id() != -1
        plain = type(logits) is torch.Tensor and type(target) is torch.Tensor
        if again or not plain or given.get("weight") is not None or not result.requires_grad:
            return
        if target.is_floating_point() or len(self._new) >= _MOST or capturing():
            return
        reduction = _REDUCTIONS[given.get("reduction", 1)]
        loss = _Loss(logits, target, given.get("ignore_index", -100), reduction)
        self._begin()
        self._new.append(loss)
        self._line = self._context.recorder.user_lines.innermost(frame)
        result.register_hook(functools.partial(self._context.guarded, WATCHER, loss.got))

    def _begin(self) -> None:
        step = self._context.recorder.current_step
        if step != self._step:
            self._step, self._new, self._backwards = step, [], []

    def _backward(self, loss: Any) -> None:
        if self._context.checking:
            self._begin()
            new, self._new = self._new, []
            if len(self._backwards) < _MOST:
                direct = _made_of_cross_entropies(loss.grad_fn)
                about = {"direct": direct, "added": direct and bool(new) and self._has_gradients()}
                self._backwards.append((about, new))

    def _has_gradients(self) -> bool:
        """Whether a small parameter has a gradient that is not zero."""
        for model in self._context.recorder.models.owners():
            for one in model.parameters():
                gradient = one.grad
                if type(gradient) is torch.Tensor and one.numel() <= _SMALL and not capturing():
                    return bool(gradient.any())
        return False

    def _made(self) -> None:
        if self._context.checking and self._backwards:
            every = (
                p for model in self._context.recorder.models.owners() for p in model.parameters()
            )
            one = next((p for p in every if type(p.grad) is torch.Tensor), None)
            if one is not None:
                self._after = one, one.grad, one.grad._version

    def _write(self, step: int) -> None:
        backwards, self._backwards = self._backwards, []
        (one, made, version), self._after = self._after, (None, None, 0)
        changed = 0 if one is None else -1 if one.grad is not made else made._version - version
        if step == self._step and any(new for _, new in backwards):
            rows = [
                {**about, "of": [one.read() for one in new if one.weights is not None]}
                for about, new in backwards
            ]
            self._context.log.event(
                "losses", step=step, line=self._line, changed=changed, backwards=rows
            )


def _made_of_cross_entropies(node: Any) -> bool:
    """Whether a loss is the sum of cross entropies times constants."""
    seen = {node}
    waiting = [node]
    while waiting and len(seen) < _MOST_NODES:
        name = type(waiting[-1]).__name__
        node = waiting.pop()
        if name.startswith(_CROSS_ENTROPY):
            continue
        inner = [one for one, _ in getattr(node, "next_functions", ()) if one is not None]
        if not inner or not name.startswith(_LINEAR):
            return False
        waiting += [one for one in inner if one not in seen]
        seen.update(inner)
    return not waiting
