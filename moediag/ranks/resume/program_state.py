"""The state of a training program in a few numbers for each tensor: of its models, optimizers,
schedulers, loss scalers, generators, and of copies of its weights. Nothing here communicates."""

from __future__ import annotations

import gc
import math
import random
import sys
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch
from torch.optim import lr_scheduler
from torch.optim import optimizer as torch_optimizer

from moediag.protocol import recorded_state as words
from moediag.protocol.names import clean_fqn
from moediag.protocol.recorded_state import Item, Items, Part
from moediag.ranks.verify.model_pieces import Piece
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step.checkpoint_files import generator_value, plain_text
from moediag.recorder.step.numbers import Fingerprints, part_fingerprint, row_fingerprints
from moediag.recorder.step.pieces import BOX, WHOLE, Where, held, where

_MOST_ROWS = 128
_MOST_ELEMENTS = 1 << 26  # of a part whose place in the whole is looked at
_PLAIN = (bool, int, float, str)
# How an update is computed, not what it computes.
_HOW = ("params", "foreach", "fused", "capturable", "differentiable")
# A scheduler that is made anew at the right position counts its own calls from there.
_OWN_COUNTS = ("_step_count", "verbose", "_get_lr_called_within_step", "_is_initial")


class StateOf:
    """Collects one state; :meth:`items` reads all fingerprints at once."""

    def __init__(self) -> None:
        self._prints = Fingerprints()
        self._tensors: List[Tuple[str, str, int, List[str], Optional[Part]]] = []
        self._values: Items = {}

    def value(self, kind: str, name: str, value: Any) -> None:
        self._values.setdefault(kind, {})[name] = Item(plain_text(value))

    def tensor(
        self, kind: str, name: str, tensor: Any, rows: bool = False, at: Optional[Where] = None
    ) -> None:
        """``at``: where a plain ``tensor`` lies in the whole; None: it is the whole."""
        part = held(tensor).detach()
        place = _part(tensor, at)
        number = self._prints.add(part)
        self._prints.add_sketch(number, part)
        own = row_fingerprints(part, _MOST_ROWS) if rows else []
        self._tensors.append((kind, name, number, own, place))

    def items(self) -> Items:
        read, sketches = self._prints.read(), self._prints.sketches()
        found = {kind: dict(items) for kind, items in self._values.items()}
        for kind, name, at, rows, part in self._tensors:
            value = read[at]
            if value is not None:
                sketch = [_for_json(one) for one in sketches.get(at, ())]
                found.setdefault(kind, {})[name] = Item(value, sketch, rows, part)
        return found

    # ------------------------------------------------------------------------ before the forward

    def models(self, pieces: Iterable[Piece], roots: Sequence[Any]) -> None:
        for piece in pieces:
            of_model = piece.owner is not None
            kind = words.PARAMETER if of_model else words.BUFFER
            self.tensor(kind, piece.name, piece.read(), rows=of_model, at=piece.where)
            if of_model:
                trained = "trained" if piece.owner.requires_grad else "frozen"
                self.value(words.FROZEN, piece.name, trained)
        for number, root in enumerate(roots):
            prefix = f"model{number + 1}." if number else ""
            for name, module in root.named_modules():
                if not module.training:
                    self.value(words.MODE, prefix + (clean_fqn(name) or "the model"), "evaluation")

    def generators(self) -> None:
        self.tensor(words.GENERATOR, "torch", torch.get_rng_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.tensor(words.GENERATOR, "cuda", torch.cuda.get_rng_state())
        self.value(words.GENERATOR, "python", generator_value(random.getstate()))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            _, keys, position, *_ = numpy.random.get_state()
            self.tensor(words.GENERATOR, "numpy", torch.from_numpy(keys.astype("int64")))
            self.value(words.GENERATOR, "numpy's position", int(position))

    # ------------------------------------------------------------------------ before the update

    def optimizers(self, found: Sequence[Any], names: Mapping[int, str]) -> None:
        for number, optimizer in enumerate(found, start=1):
            own = f"optimizer {number}: " if len(found) > 1 else ""
            for at, group in enumerate(optimizer.param_groups):
                self._group(f"{own}group {at}", group)
                for place, parameter in enumerate(group["params"]):
                    name = names.get(id(parameter))
                    if name is None:
                        name = f"{own}group {at} parameter {place}"
                        self.tensor(words.MAIN, name, parameter)
                    self._state(own + name, optimizer.state.get(parameter, {}))

    def _group(self, name: str, group: Mapping[str, Any]) -> None:
        for key, value in group.items():
            if key in _HOW:
                continue
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                self.value(words.SETTING, f"{key} of {name}", float(value))
            elif _plain(value):
                self.value(words.SETTING, f"{key} of {name}", value)

    def _state(self, name: str, state: Mapping[str, Any]) -> None:
        for key, value in state.items():
            if key == "step":
                self.value(words.COUNT, name, float(value))
            elif isinstance(value, torch.Tensor):
                self.tensor(words.STATE, f"{key} of {name}", value, rows=True)
            elif isinstance(value, _PLAIN):
                self.value(words.STATE, f"{key} of {name}", value)

    def schedulers(self, found: Sequence[Any]) -> None:
        for number, one in enumerate(found, start=1):
            own = type(one).__name__ + (f" {number}" if len(found) > 1 else "")
            for key, value in one.state_dict().items():
                if key not in _OWN_COUNTS and _plain(value):
                    self.value(words.SCHEDULER, f"{key} of {own}", value)

    def scalers(self, found: Sequence[Any]) -> None:
        for number, one in enumerate(found, start=1):
            own = f" of scaler {number}" if len(found) > 1 else ""
            for key, value in one.state_dict().items():
                self.value(words.SCALER, f"{key}{own}", value)

    def copies(self, found: Sequence[Mapping[str, Any]]) -> None:
        for number, copy in enumerate(found, start=1):
            for name, tensor in copy.items():
                self.tensor(words.COPY, f"copy {number}: {name}", tensor)


class Objects:
    """The objects of the program that hold state beside its models."""

    def __init__(self, roots: Sequence[Any], pieces: Sequence[Piece], stepping: Any) -> None:
        """``stepping``: the optimizer that makes this step; others count if they have parameters of
        the models."""
        self.optimizers: List[Any] = []
        self.schedulers: List[Any] = []
        self.scalers: List[Any] = []
        self._modules: List[Any] = []
        self._dicts: List[Dict[Any, Any]] = []
        self._lists: List[List[Any]] = []
        self._roots = roots
        self._own = {p.name: p.owner for p in pieces if p.owner is not None}
        self._trained = [p for p in self._own.values() if p.requires_grad]
        sorters: Dict[type, Any] = {}
        for one in gc.get_objects():  # millions of them, of a few thousand classes
            kind = type(one)
            if kind not in sorters:
                sorters[kind] = self._sorter(kind)
            sort_in = sorters[kind]
            if sort_in is not None:
                sort_in(one)
        places = {id(owner): at for at, owner in enumerate(self._own.values())}
        inner = [
            one
            for one in self.optimizers
            if not _wraps(one) and (one is stepping or _first(one, places)[0] < len(places))
        ]
        self.optimizers = sorted(inner, key=lambda one: _first(one, places))
        known = {id(one): at for at, one in enumerate(self.optimizers)}
        mine = [s for s in self.schedulers if id(_stepping(s)) in known]
        self.schedulers = sorted(mine, key=lambda s: (known[id(_stepping(s))], type(s).__name__))

    def _sorter(self, kind: type) -> Optional[Callable[[Any], None]]:
        """What keeps an object of this class; None: it is of no interest."""
        if kind is dict:
            return self._add_dict if self._own else None
        if kind is list:
            return self._add_list if self._trained else None
        if issubclass(kind, torch.nn.Module):
            return self._modules.append
        if issubclass(kind, torch_optimizer.Optimizer):
            return self._add_optimizer
        if issubclass(kind, lr_scheduler.LRScheduler):
            return self.schedulers.append
        return self._add_scaler if issubclass(kind, torch.amp.GradScaler) else None

    def _add_dict(self, one: Any) -> None:
        if len(self._trained) <= len(one) <= 4 * len(self._own):
            self._dicts.append(one)

    def _add_list(self, one: Any) -> None:
        if len(one) == len(self._trained) and isinstance(one[0], torch.Tensor):
            self._lists.append(one)

    def _add_optimizer(self, one: Any) -> None:
        if getattr(one, "param_groups", None):
            self.optimizers.append(one)

    def _add_scaler(self, one: Any) -> None:
        if one._enabled and one._scale is not None:
            self.scalers.append(one)

    def copies(self, was_loaded: Callable[[Any], bool]) -> List[Dict[str, Any]]:
        """Returns copies of the weights, by parameter: whole modules, then dictionaries and lists
        of tensors; those that came out of a file are last."""
        taken = {_at(p) for p in self._own.values()}
        taken |= {_at(p.grad) for p in self._own.values() if p.grad is not None}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                taken |= {_at(p) for p in group["params"]}
            for state in optimizer.state.values():
                taken |= {_at(v) for v in state.values() if isinstance(v, torch.Tensor)}
        inside = {id(module) for root in self._roots for module in root.modules()}
        found: List[Dict[str, Any]] = []
        for module in self._modules:
            if id(module) not in inside:
                named = module.named_parameters()
                self._add(found, {clean_fqn(name): p for name, p in named}, taken)
        for one in self._dicts:
            self._add(found, {_clean(name): v for name, v in one.items()}, taken)
        names = [name for name, p in self._own.items() if p.requires_grad]
        for own in self._lists:
            self._add(found, dict(zip(names, own)), taken)  # noqa: B905 - Python 3.9
        return sorted(found, key=lambda copy: was_loaded(next(iter(copy.values()))))

    def _add(self, found: List[Dict[str, Any]], copy: Dict[str, Any], taken: Any) -> None:
        own = {name: copy[name] for name in self._own if name in copy}
        if len(own) < len(self._trained):
            return
        for name, value in own.items():
            if not isinstance(value, torch.Tensor) or value.shape != self._own[name].shape:
                return
            if _at(value) in taken:
                return
        found.append(own)
        taken.update(map(_at, own.values()))


def _part(part: Any, at: Optional[Where]) -> Optional[Part]:
    """What ``part`` is of a whole tensor; None: not known."""
    try:
        at = where(part) if at is None else at
    except NotApplicable:
        return None
    local = held(part).detach()
    if local.numel() > _MOST_ELEMENTS:
        return None
    value, places = part_fingerprint(local, at.positions(tuple(local.shape)))
    rows = at.kind in (WHOLE, BOX) and local.dim() > 0 and tuple(local.shape[1:]) == at.shape[1:]
    first = (at.at[0] if at.kind == BOX else 0) if rows else None
    return Part(value, places, local.numel(), math.prod(at.shape), first)


def _at(tensor: Any) -> Any:
    part = held(tensor)
    try:
        return part.data_ptr() or id(part)
    except RuntimeError:  # it has no storage
        return id(part)


def _clean(name: Any) -> str:
    return clean_fqn(name) if isinstance(name, str) else ""


def _stepping(scheduler: Any) -> Any:
    """The optimizer whose settings it changes, without wrappers."""
    optimizer = getattr(scheduler, "optimizer", None)
    while isinstance(optimizer, torch_optimizer.Optimizer) and _wraps(optimizer):
        optimizer = _inner(optimizer)
    return optimizer


def _wraps(optimizer: Any) -> bool:
    return isinstance(_inner(optimizer), torch_optimizer.Optimizer)


def _inner(optimizer: Any) -> Any:
    """What accelerate's and Lightning's optimizers have of another one."""
    return vars(optimizer).get("optimizer") or vars(optimizer).get("_optimizer")


def _first(optimizer: Any, places: Mapping[int, int]) -> Tuple[int, str]:
    """Where the first of its parameters is in the model."""
    own = [places.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
    known: List[int] = [place for place in own if place is not None]
    return min(known, default=len(places)), type(optimizer).__name__


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, _PLAIN)


def _for_json(value: Optional[float]) -> Any:
    return value if value is None or abs(value) < float("inf") else str(value)
