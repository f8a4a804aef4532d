"""Records, at checked steps, how much each token counts in the gradient: of each cross entropy the
targets that count, and the gradient that its result gets in the backward; and how much each mean
counts that is a part of a loss.

losses      step line(the user's that computed the last one) changed(how often a gradient was
            changed in place after the last backward; -1: replaced) mean[ranks over whose samples
            FSDP or DeepSpeed takes the mean of gradients] backwards[{
            direct(bool: the loss is made of cross entropies and constants alone)
            added(bool: parameters had gradients before it)
            moved(bool: a parameter has another value than in the backward before)
            left(bool: parameters have gradients after it)
            means[the gradient of each mean of which the loss is a sum]
            rest[the loss, what no part of it is; empty if it has parts of unknown value]
            of[[targets that count, all targets, classes, sum of the tokens' weights, the smallest
            and the largest weight]]}]
"""

from __future__ import annotations

import functools
from itertools import islice
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
from torch.jit import _builtins

from moediag.recorder.laws.context import LawContext, several_ranks
from moediag.recorder.step.numbers import capturing, digest
from moediag.recorder.step.pieces import local

WATCHER = "laws of losses"
_MOST = 64  # of one step
_SMALL = 1 << 16  # elements of a parameter that is read
_FEW = 16  # such parameters
_MOST_NODES = 256  # of the graph of a loss
# Functions that torch.jit knows by their id, which no other object may get.
_kept: List[Any] = []
_CROSS_ENTROPY = ("NllLoss", "CrossEntropyLoss")
# Losses of torch of which the value is known, and of which a loss may be a sum.
_VALUED = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
_MOST_VALUES = 1 << 22
_PART = "moediag"  # what their nodes have, in the metadata
_EXACT = {torch.float32, torch.float64}
_ARGUMENTS = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
_REDUCTIONS = ("none", "mean", "sum")  # by torch's number
_WRAPPER = "_DDPSink"
# Nodes of autograd that add, or multiply by a constant.
_LINEAR = (
    "Add", "Clone", "Div", "Index", "MaskedSelect", "Mean", "Mul", "Neg", "Reshape", "Select",
    "Squeeze", "Stack", "Sum", "ToCopy", "UnsafeView", "Unsqueeze", "View", _WRAPPER,
)  # fmt: skip


class _Part:
    """A part of a loss, and what it contributes: its value times its gradient."""

    def __init__(self, result: Any) -> None:
        self.value = result.detach().clone()  # the program may change it in place
        self.share: Any = None

    def got(self, gradient: Any) -> None:
        """The gradient of its result."""
        self.share = (self.value.double() * gradient.detach().double()).sum()


class _Loss(_Part):
    """One call of cross_entropy or nll_loss."""

    def __init__(self, result: Any, given: Any, target: Any, ignored: int, reduction: str) -> None:
        super().__init__(result)
        self.reduction = reduction
        self.valid = target.detach() != ignored
        self.shape = target.numel(), given.shape[1] if given.dim() > 1 else given.shape[0]
        self.weights: Any = None  # sum, smallest, largest

    def got(self, gradient: Any) -> None:
        super().got(gradient)
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
        self._waiting: List[int] = []  # a step whose losses are not complete
        self._line = ""
        self._new: List[_Loss] = []  # since the last backward
        self._backwards: List[Tuple[Dict[str, Any], List[_Loss]]] = []
        self._after: Tuple[Any, Any, int] = None, None, 0  # a parameter, its gradient and version
        self._small: Any = None  # a parameter in the last backward
        # All cross entropies of torch.nn end in the first one, those of log probabilities in the
        # second one.
        for name in ("cross_entropy_loss", "nll_loss_nd", *_VALUED):
            tell = self._valued if name in _VALUED else self._called
            replace_builtin(context, WATCHER, torch._C._nn, name, tell)
        context.before_backward.add(WATCHER, self._backward, checked=True)
        context.after_backward.add(WATCHER, self._made, checked=True)
        context.after_step.add(WATCHER, self._updated, pending=self._waiting)
        context.on_check.append(self._write)

    def _valued(self, _frame: Any, result: Any, *_: Any, **__: Any) -> None:
        again = torch._C._current_graph_task_id() != -1
        plain = type(result) is torch.Tensor and result.numel() <= _MOST_VALUES
        if plain and result.requires_grad and not (again or capturing()):
            self._begin()
            self._follow(result, _Part(result))

    def _follow(self, result: Any, part: _Part) -> None:
        """The node of ``result`` keeps ``part``, which must not keep a graph alive."""
        result.grad_fn.metadata[_PART] = part
        result.register_hook(functools.partial(self._context.guarded, WATCHER, part.got))

    def _called(self, frame: Any, result: Any, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(_ARGUMENTS, args)), **kwargs}  # noqa: B905 - Python 3.9
        logits, target = given["input"], given["target"]
        again = torch._C._current_graph_task_id() != -1
        plain = type(logits) is torch.Tensor and type(target) is torch.Tensor
        if again or not plain or not result.requires_grad or capturing():
            return
        if (weight := given.get("weight")) is not None:
            what = f"class weights of cross_entropy = {digest(weight, size=4)}"
            self._context.settings[what] = 1, self._context.line(frame)
        if weight is not None or target.is_floating_point() or len(self._new) >= _MOST:
            return
        reduction = _REDUCTIONS[given.get("reduction", 1)]
        loss = _Loss(result, logits, target, given.get("ignore_index", -100), reduction)
        self._begin()
        self._new.append(loss)
        self._line = self._context.line(frame)
        smoothing = given.get("label_smoothing", 0.0)
        self._context.settings[f"label_smoothing of cross_entropy = {smoothing}"] = 1, self._line
        self._follow(result, loss)

    def _begin(self) -> None:
        step = self._context.step
        if step != self._step:
            self._step, self._new, self._backwards = step, [], []

    def _backward(self, loss: Any) -> None:
        self._begin()
        new, self._new = self._new, []
        if len(self._backwards) < _MOST:
            direct = _made_of_cross_entropies(loss)
            added = bool(self._backwards) and self._has_gradients()
            means: List[Any] = []
            parts = self._parts(loss)
            about = {"direct": direct, "added": added, "moved": self._moved(), "left": False,
                     "means": means, "rest": parts}  # fmt: skip
            self._backwards.append((about, new))
            keep = functools.partial(self._context.guarded, WATCHER, _keep, means)
            for node in _means_of(loss) if several_ranks() else ():
                node.register_prehook(keep)

    def _parts(self, loss: Any) -> List[_Part]:
        """The loss and all its parts; [] if the values of some are unknown, or rounded."""
        whole, nodes = _Part(loss), terms(loss, _LINEAR)
        self._context.settings[f"terms of the loss = {len(nodes)}"] = 1, self._line
        parts = [node.metadata.get(_PART) for node in nodes if node is not None]
        if len(parts) < len(nodes) or None in parts or type(loss) is not torch.Tensor:
            return []
        loss.register_hook(functools.partial(self._context.guarded, WATCHER, whole.got))
        every = [whole, *parts]
        return every if {one.value.dtype for one in every} <= _EXACT else []

    def _has_gradients(self) -> bool:
        """Whether some small parameters have a gradient that is not zero, or their wrapper keeps
        gradients elsewhere until the last micro-batch."""
        if capturing() or self._context.sets.keep_gradients():
            return not capturing()
        small = (local(p.grad) for p in self._parameters() if p.numel() <= _SMALL)
        found = [one.any().cpu() for one in islice(filter(torch.numel, small), _FEW)]
        return bool(found) and bool(torch.stack(found).any())

    def _moved(self) -> bool:
        """Whether a small matrix changed since the last backward of the step."""
        every = (p for model in self._context.models() for p in model.parameters)
        small = (local(p) for p in every if p.requires_grad and p.dim() > 1 and p.numel() <= _SMALL)
        old, one = self._small, next(small, None)
        self._small = None if one is None or capturing() else one.detach().clone()
        known = self._backwards and old is not None and self._small is not None
        return bool(known) and not torch.equal(old, self._small)

    def _parameters(self) -> Iterator[Any]:
        """Those with a gradient of elements in order."""
        every = (one for model in self._context.models() for one in model.parameters)
        return (p for p in every if p.grad is not None and p.grad.layout is torch.strided)

    def _made(self) -> None:
        for one in islice(self._parameters(), bool(self._backwards)):
            self._after = one, one.grad, one.grad._version
            self._backwards[-1][0]["left"] = True

    def _write(self, step: int) -> None:
        """A closure of the optimizer may make the last backward of the update."""
        self._waiting[:] = [step] if self._context.closure else []
        if not self._waiting:
            self._record(step)

    def _updated(self, _optimizer: Any) -> None:
        self._record(self._waiting.pop())

    def _record(self, step: int) -> None:
        backwards, self._backwards = self._backwards, []
        (one, made, version), self._after = self._after, (None, None, 0)
        changed = 0
        if one is not None and one.grad is not None:  # DeepSpeed takes them away
            changed = -1 if one.grad is not made else made._version - version
        if step == self._step and any(new or about["means"] for about, new in backwards):
            rows = [
                {**about, "of": [one.read() for one in new if one.weights is not None],
                 "means": [float(one) for one in about["means"]],
                 "rest": _rest([one.share for one in about["rest"]])}
                for about, new in backwards
            ]  # fmt: skip
            self._context.log.event(
                "losses", step=step, line=self._line, changed=changed, backwards=rows,
                mean=self._context.sets.means(),
            )  # fmt: skip


def replace_builtin(
    context: LawContext, watcher: str, owner: Any, name: str, after: Callable[..., None]
) -> None:
    """Calls ``after(frame of the caller, result, arguments)`` in checked steps. torch.jit.script
    compiles what it does not know to be a function of torch's."""
    make = context.around(watcher, after=after, checked=True)
    context.recorder.patches.replace(owner, name, make)
    _builtins._register_builtin(getattr(owner, name), f"aten::{name}")
    _kept.append(getattr(owner, name))


def _rest(shares: List[Any]) -> List[float]:
    """What is contributed by the loss, and by no part of it."""
    if not shares or None in shares:
        return []
    whole, *parts = (float(one) for one in shares)
    return [whole, whole - sum(parts)]


def _made_of_cross_entropies(loss: Any) -> bool:
    """Whether a loss is the sum of cross entropies times constants."""
    return all(type(one).__name__.startswith(_CROSS_ENTROPY) for one in terms(loss, _LINEAR))


def _means_of(loss: Any) -> List[Any]:
    """The nodes of the means of which a loss is a sum, times constants."""
    linear = tuple(name for name in _LINEAR if name != "Mean")
    return [
        one
        for one in terms(loss, linear)
        if type(one).__name__.startswith("Mean") or getattr(one, "_saved_reduction", 0) == 1
    ]


def _keep(found: List[Any], gradients: Any) -> None:
    """Keeps the gradient of one number."""
    gradient = gradients[0]
    if gradient is not None and gradient.numel() == 1:
        found.append(gradient.detach().clone())


def terms(loss: Any, linear: Tuple[str, ...]) -> List[Any]:
    """The nodes of which a loss is a sum, times constants; [None] if there are too many."""
    first = loss.grad_fn, loss.output_nr
    seen, waiting, found = {first}, [first], []
    while waiting and len(seen) < _MOST_NODES:
        node, output = waiting.pop()
        name = type(node).__name__
        edges = getattr(node, "next_functions", ())
        if name.startswith(_WRAPPER):  # it copies each output of the model from an input
            edges = edges[output : output + 1]
        inner = [edge for edge in edges if edge[0] is not None]
        part = name.startswith(_CROSS_ENTROPY) or _PART in node.metadata
        if part or not inner or not name.startswith(linear):
            found.append(node)
        else:
            waiting += [edge for edge in inner if edge not in seen]
            seen.update(inner)
    return [None] if waiting else found
