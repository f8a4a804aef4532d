"""Records, at checked steps, what torch's losses are computed of: values of another kind than they
take, shapes that differ, and targets that are tokens of the model.

loss_inputs     step name(of the function) line unfit(bool: probabilities where scores are taken, or
                where logarithms are taken, scores or probabilities)
                spread(bool: the input and the target are repeated along a dimension of the other)
                ahead(by how many places a target is after the token that predicts it; -1: targets
                are no tokens of an embedding) counted(targets that count)
                padding(those of them that are padding after padding)
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Dict, List, Mapping

import torch

from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.loss_weights import replace_builtin, terms
from moediag.recorder.modules import unwrapped
from moediag.recorder.step.numbers import capturing

WATCHER = "laws of what losses get"
_SCORES = ("cross_entropy_loss", "nll_loss_nd")
_BINARY = "binary_cross_entropy_with_logits"
_ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_MOST = 16  # calls of one step
_ROWS = 16  # samples of which scores are read: a copy of all may be too large
_NEAR = 1e-2  # a sum of probabilities of 16 bits
_TOKENS = 8  # targets that show that they are tokens
_NONE: Dict[str, Any] = {"unfit": False, "spread": False, "ahead": -1, "counted": 0, "padding": 0}
# Nodes of autograd that keep the elements of a tensor.
_SAME = (
    "Clone", "Index", "Permute", "Reshape", "Select", "Slice", "Squeeze", "ToCopy", "Transpose",
    "UnsafeView", "Unsqueeze", "View", "_DDPSink",
)  # fmt: skip


class LossInputs:
    """Reads them when a loss with a gradient is computed."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._rows: List[Dict[str, Any]] = []  # of the running step
        self._padding: Any = None  # the token that the mask of the last forward leaves out
        for name in (*_SCORES, *_ELEMENTWISE, "kl_div", _BINARY):
            owner: Any = torch._C._nn if hasattr(torch._C._nn, name) else torch
            replace_builtin(context, WATCHER, owner, name, functools.partial(self._called, name))
        context.forward.add(WATCHER, self._begin, checked=True)
        context.on_check.append(self._write)

    def _begin(self, root: Any, args: Any, kwargs: Any) -> None:
        self._context.embedded, self._padding = [], None
        if capturing():
            return
        names = inspect.signature(unwrapped(root).forward).parameters
        given = {**dict(zip(names, args)), **kwargs}  # noqa: B905 - Python 3.9
        for batch in [one for one in given.values() if isinstance(one, Mapping)]:
            given.update(batch)
        ids: Any = next(filter(_is_tokens, given.values()), None)
        for name, mask in given.items() if ids is not None else ():
            if "mask" in name and mask is not ids and getattr(mask, "shape", ()) == ids.shape:
                left_out = ids[mask == 0].unique()
                self._padding = left_out[0] if len(left_out) == 1 else self._padding

    def _called(self, name: str, frame: Any, result: Any, *args: Any, **_: Any) -> None:
        """As torch.nn.functional calls them: all arguments have places."""
        plain = [type(one) is torch.Tensor and one.numel() > 0 for one in args[:2]]
        again = torch._C._current_graph_task_id() != -1
        if plain != [True, True] or again or not result.requires_grad or capturing():
            return
        given, target = args[0].detach(), args[1].detach()
        row: Dict[str, Any] = {"name": name, "line": self._context.line(frame), **_NONE}
        if name == _BINARY:
            kinds = [type(node).__name__ for node in terms(args[0], _SAME)]
            row["unfit"] = all(kind.startswith("Sigmoid") for kind in kinds)
        elif name in _ELEMENTWISE:
            row["spread"] = bool(args[2:3] != (0,) and _repeated(given) and _repeated(target))
        elif name == "kl_div":
            row["unfit"] = given.amax() > _NEAR
        else:
            row["unfit"] = _unfit(name, given)
            row.update(self._tokens(target, target != args[4]))
            if args[2] is not None or args[3] == 0:  # the program may leave out some
                row["padding"] = 0
        self._rows = [*self._rows[1 - _MOST :], row]

    def _tokens(self, target: Any, valid: Any) -> Dict[str, Any]:
        """What is known of targets that are the tokens that an embedding got."""
        every = [(at, *of) for at in (1, 2, 0) for of in self._context.embedded]
        for ahead, ids, padding in every if not target.is_floating_point() else ():
            of = min(target.numel() // len(ids), ids.shape[1] - ahead)
            if target.numel() % len(ids) or of < 1:
                continue
            rows, counts = (one.reshape(len(ids), -1)[:, :of] for one in (target, valid))
            found = rows[counts]
            same = torch.equal(found, ids[:, ahead : ahead + of][counts])
            if same and len(found) >= _TOKENS and len(found.unique()) > 2:
                tokens = [one for one in (padding, self._padding) if one is not None]
                both = [counts & (rows == one) & (ids[:, :of] == one) for one in tokens]
                most = max((int(one.sum()) for one in both), default=0)
                return {"ahead": ahead, "counted": len(found), "padding": most}
        return {}

    def _write(self, step: int) -> None:
        rows, self._rows = self._rows, []
        self._context.embedded = []
        for row in rows:
            row["unfit"] = bool(row["unfit"])
            self._context.log.event("loss_inputs", step=step, **row)


def _is_tokens(value: Any) -> bool:
    tokens = (torch.int32, torch.int64)
    return type(value) is torch.Tensor and value.dim() == 2 and value.dtype in tokens


def _repeated(value: Any) -> bool:
    """Whether it has a dimension along which it has the same elements of memory."""
    return any(not step and size > 1 for step, size in zip(value.stride(), value.shape))  # noqa: B905


def _unfit(name: str, given: Any) -> Any:
    """Whether rows of scores are probabilities; of logarithms, also whether most have elements of
    both signs. Logarithms times an advantage or a focus have one."""
    if given.dim() < 2:
        given = given[None]
    places = slice(_ROWS), slice(None), *[slice(2)] * (given.dim() - 2)
    rows = given[places].movedim(1, -1).flatten(0, -2).float()
    low, high, whole = rows.amin(1), rows.amax(1), (rows.sum(1) - 1).abs() < _NEAR
    probabilities = ((low >= 0) & whole).all() & (rows.shape[1] > 1)
    mixed = (low < 0) & (high > _NEAR)
    return probabilities | ((mixed.float().mean() > 0.5) & (name != "cross_entropy_loss"))
