"""Records what ranks hold of a model's layers, and for which tokens its embeddings give zeros.

layers      lists{name: [[position, class, has parameters]]}   of numbered modules, where some have
            no parameters or are absent
embedding   step module tokens(different ones) zeros[tokens that got zeros only; at most 16]
"""

from __future__ import annotations

from typing import Any, Dict, List

import torch

from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext
from moediag.recorder.modules import Hook
from moediag.recorder.step.numbers import capturing

WATCHER = "laws of modules"
_MOST_EMBEDDINGS = 8  # of one model
_MOST_ZEROS = 16


class ModelStructure:
    """Looks at each model once, in its first forward."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._known = ByObject()  # models
        self._context.forward.add(WATCHER, self._called)

    def _called(self, root: Any, *_: Any) -> None:
        if self._known.get(root):
            return
        self._known.set(root, True)
        parts = self._context.parts(root)
        lists: Dict[str, List[List[Any]]] = {}
        embeddings: List[Any] = []
        for module in parts.modules:
            children = dict(module.named_children())
            if children and all(name.isdigit() for name in children):
                held = [(next(one.parameters(), None) is not None) for one in children.values()]
                if len(held) <= max(map(int, children)) or not all(held):
                    kinds = [type(one).__name__ for one in children.values()]
                    rows = zip(map(int, children), kinds, held)  # noqa: B905 - Python 3.9
                    lists[self._context.name(module)] = [list(row) for row in rows]
            if _embeds(module) and len(embeddings) < _MOST_EMBEDDINGS:
                embeddings.append(module)
        self._context.log.event("layers", keep=True, lists=lists)
        # Dynamo traces the hooks of modules that it compiles.
        for module in [] if parts.compiled else embeddings:
            handle = module.register_forward_hook(Hook(self._embedded))
            self._context.recorder.on_uninstall.append(handle.remove)

    def _embedded(self, _recorder: Any, module: Any, args: Any, result: Any) -> None:
        context = self._context
        if not context.checking or not torch.is_grad_enabled() or capturing():
            return
        ids: Any = args[0] if args else None
        if type(ids) is not torch.Tensor or type(result) is not torch.Tensor:
            return
        if ids.dtype not in (torch.int32, torch.int64) or result.shape[:-1] != ids.shape:
            return
        if ids.dim() == 2:
            context.embedded.append((ids, getattr(module, "padding_idx", None)))
        empty = torch.eq(result, 0).all(-1)
        tokens, places = torch.unique(ids, return_inverse=True)
        given = torch.zeros(len(tokens), dtype=torch.int64, device=ids.device)
        given.index_add_(0, places.reshape(-1), (~empty).reshape(-1).to(torch.int64))
        zeros = tokens[given == 0][:_MOST_ZEROS].tolist()
        name = context.name(module) or type(module).__name__
        context.event("embedding", zeros=zeros, tokens=len(tokens), module=name)


def _embeds(module: Any) -> bool:
    """Whether it may turn tokens into rows of a matrix of its own."""
    own = [one for one in module._parameters.values() if one is not None]
    return len(own) == 1 and own[0].dim() == 2 and not isinstance(module, torch.nn.Linear)
