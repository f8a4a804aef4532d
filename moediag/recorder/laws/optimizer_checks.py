"""Records, when an optimizer steps, fingerprints of what must be equal on other ranks.

A check cannot wait for another rank: which steps are checked depends only on the step's number, so
all ranks check the same ones.

updated     step names[parameters that had not changed since the check before, and that the update
            changed]
discarded   model[the part of the key of its checks before the dot]
"""

from __future__ import annotations

import collections
import hashlib
import weakref
from typing import Any, Deque, Dict, List, Optional, Tuple

import torch

from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext, next_checked
from moediag.recorder.laws.loss_scale import LossScale
from moediag.recorder.laws.replica_sets import PART, PLACED, Piece
from moediag.recorder.parameter_names import parameters_of
from moediag.recorder.step.numbers import Fingerprints, capturing
from moediag.recorder.step.pieces import distributed, local, placed_alike

WATCHER = "laws"
_MAX_OPTIMIZERS = 64  # a program that makes one for each parameter is not checked further
_STUCK = 8  # calls of step() without a new step: its model is not seen running
_MAX_STILL = 64  # parameters that are read again after an update
_MAX_NONFINITE = 20  # names that are listed
_FEW = 8  # parameters whose state tells how many updates it has counted
_PAST = 32  # updates that a check tells of
_OFTEN = 10  # states that are kept of saves that follow each other closely, and steps between them
KEPT = "kept"  # the check of the step after a save: a restart may begin with it


class Known:
    """What is known of one optimizer, or of a whole model."""

    def __init__(self) -> None:
        self.step = 0  # of the last call
        self.backwards = 0  # calls of backward() until the last call
        self.same = 0  # calls since the step's number last changed
        self.count = 0  # calls of step() so far
        self.zero_rates = 0  # updates in a row whose learning rates are all 0
        self.saves = 0  # calls of torch.save when a state was last kept
        self.saved: List[int] = []  # steps whose state was kept
        self.groups: List[Any] = []  # of the sets of its last check: what is known of each
        # The updates so far and the calls on these groups, before each of the last updates.
        self.past: Deque[List[Optional[int]]] = collections.deque(maxlen=_PAST)
        self.looked = 0  # the step in which a model that has its parameters was looked for
        self.due = 1  # the next step to check, or the first one after it
        self.model = ""  # the optimizer's class, its parameter names, and which model of these
        self.ordinal: Optional[int] = None  # among optimizers of the same model
        self.values: Dict[str, Optional[str]] = {}  # of parameters at the last check
        # Parameters with the value of the check before: name, parameter, value.
        self.still: List[Tuple[str, Any, Optional[str]]] = []
        # Of a model, by position: a weak reference to the optimizer's copy of the parameter.
        self.copies: Optional[Dict[int, Any]] = None


class OptimizerChecks:
    """Checks what optimizers have before their updates."""

    def __init__(self, context: LawContext, scale: LossScale) -> None:
        self._context = context
        self._recorder = context.recorder
        self._scale = scale
        self._optimizers = ByObject()  # optimizer -> Known
        self._alive: Dict[str, Any] = {}  # model -> weak reference to it
        self._ordinals: Dict[str, int] = {}  # model -> optimizers that have it
        self._layouts: Dict[str, int] = {}  # text of a pieces event -> its id
        self._backwards = 0  # calls of backward() so far
        self._told = 0  # the last step of which ``on_step`` was told
        self.none = True  # the program has made no optimizer of torch: it updates by itself
        making = self._context.around(WATCHER, lambda *_: setattr(self, "none", False))
        self._recorder.patches.replace(torch.optim.Optimizer, "add_param_group", making)
        context.owned = self.owned
        self._context.after_backward.add(WATCHER, self._after_backward)
        self._context.before_step.add(WATCHER, self._step)
        self._context.after_step.add(WATCHER, self._updated)

    def owned(self) -> List[Any]:
        """The parameters of the optimizers that stepped and still exist; of a program that updates
        by itself those of all models that train."""
        if self.none:
            every = (p for model in self._context.models() for p in model.parameters)
            return [p for p in every if p.requires_grad]
        return [p for one in self._optimizers.owners() for p in parameters_of(one)]

    def _after_backward(self) -> None:
        """Where the program updates by itself, the next forward begins a step, and a checked one is
        read here, before an update."""
        self._backwards += 1
        if self.none:
            step, self._recorder.stepped = self._context.step, True
            if self._context.checking and step != self._told and not capturing():
                with torch.no_grad():
                    self._tell(step)

    def _step_of(self, known: Known) -> int:
        """The number of the running step. A forward after an optimizer's step begins a new one, so
        that an extra call of step() on one rank does not shift its numbers; where no model is seen
        running, the optimizer's own calls count. Several after one backward() are of one step:
        DeepSpeed makes one for each group of parameters."""
        if self._context.step > 1:
            return self._context.step
        again = known.count and known.backwards == self._backwards > 0
        return known.step if again else known.count + 1

    def _step(self, optimizer: Any, closure: bool, frame: Any) -> None:
        context = self._context
        context.closure = closure  # a gradient may be missing until it has run
        context.sets.stepped()
        context.steps += 1
        context.updated = parameters_of(optimizer)
        self.none = False  # also where it was made before anything was recorded
        known = self._optimizers.get(optimizer) or self._optimizers.set(optimizer, Known())
        step = self._step_of(known)
        known.backwards = self._backwards
        rates = [group.get("lr") for group in optimizer.param_groups]
        zero = all(type(rate) in (int, float) and not rate for rate in rates)
        known.zero_rates = known.zero_rates + 1 if zero else 0
        if known.groups and not context.sets.joins():
            known.past.append([known.count, *map(issued, known.groups)])
        known.same = known.same + 1 if step == known.step else 0
        known.step = step
        if known.same == 1 and context.step:
            self._recorder.look_for_models()
        if known.same == _STUCK:
            self._recorder.note_not_seen(
                "laws: later steps of a model that was first called after the first step"
            )
        if step >= known.due and not capturing():
            known.due = next_checked(step, context.every)
            for model in [m for m, one in self._alive.items() if one() is None]:
                del self._alive[model]
                context.log.event("discarded", keep=True, model=model)
            with torch.no_grad():
                self._check(optimizer, known, step, context.line(frame))
                self._tell(step)
        many = len(known.saved) >= _OFTEN and step < known.saved[-1] + _OFTEN
        if known.saves != context.saves and known.count and not many and not capturing():
            known.saves = context.saves
            known.saved.append(step)
            with torch.no_grad():
                self._check(optimizer, known, step, "", KEPT)
        known.count, context.updated = known.count + 1, None  # it keeps parameters alive

    def _tell(self, step: int) -> None:
        first, self._told = step != self._told, step
        for tell in [*(self._context.on_step if first else ()), *self._context.on_check]:
            self._context.guarded(WATCHER, tell, step)

    def _check(
        self, optimizer: Any, known: Known, step: int, line: str, kind: str = "check"
    ) -> None:
        found = [
            (parameter, number)
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        ]
        names = self._context.names.of([parameter for parameter, _ in found])
        named = [(p, g, n) for (p, g), n in zip(found, names) if n is not None]  # noqa: B905
        alone = [  # that belong to no module, such as a learned temperature
            (p, group, f"{type(optimizer).__name__}'s parameter {at}")
            for at, ((p, group), name) in enumerate(zip(found, names))  # noqa: B905
            if name is None and type(p) is torch.nn.Parameter and p.numel() == 1
        ]
        if named and len(named) + len(alone) == len(found):
            named += alone
        ranks = self._context.sets.engine_ranks(optimizer) if not named else ()
        if ranks:
            named = [(p, number, f"partition {at}") for at, (p, number) in enumerate(found)]
        if len(named) < len(found) and not known.looked:
            known.looked = step
            known.due = min(known.due, step + 2)  # when its model has been seen running
            self._recorder.look_for_models()
        elif len(named) < len(found) and step > known.looked + 1:
            self._recorder.note_not_seen(
                "laws: parameters of an optimizer that belong to no module seen running "
                "(DeepSpeed's partitions are such parameters)"
            )
        if not named:
            return
        parameters = [parameter for parameter, _, _ in named]
        part = Piece(f"{self._recorder.rank}", PART, ranks, None)
        pieces = [part] * len(named) if ranks else self._context.sets.pieces(parameters)
        layout = self.layout(type(optimizer).__name__, known, named, pieces)
        if layout is None:
            return
        number, known.groups = layout
        clocks = [*map(issued, known.groups)]
        if not known.past:  # the first check
            known.past.append([known.count, *clocks])
        prints = Fingerprints()
        values, finite = prints.add_all(parameters), prints.add_all(parameters, finite=True)
        gradients = [_gradient(p) for p in parameters]
        made, finite_made = prints.add_all(gradients), prints.add_all(gradients, finite=True)
        parts = any(map(distributed, parameters))
        for at, piece in enumerate(pieces):
            small = parts and parameters[at].dim() < 2 and len(piece.ranks) < 2
            if (small or piece.how == PLACED) and gradients[at] is not None:
                prints.add_sketch(at, gradients[at])
        tensors, plain = _state(optimizer, parameters)
        state = {name: prints.add_all(row) for name, row in tensors.items()}
        scale = self._scale.of(optimizer)
        read = prints.read()
        told = [name for _, _, name in named]
        now = dict(zip(told, read[values]))  # noqa: B905
        known.still = [
            (n, p, now[n]) for p, _, n in named if now[n] and now[n] == known.values.get(n)
        ][:_MAX_STILL]  # fmt: skip
        known.values = now
        self._context.log.event(
            kind, pieces=number, step=step, count=known.count, age=_age(optimizer, parameters),
            zero_rates=known.zero_rates, clocks=clocks, past=list(known.past),
            params=read[values],
            grads=[shown_gradient(p, g, one, self._context.closure) for p, g, one
                   in zip(parameters, gradients, read[made])],  # noqa: B905
            sketches=prints.sketches(),
            state={**{name: read[places] for name, places in state.items()}, **plain},
            hyper=[{**_hyper(group), **scale} for group in optimizer.param_groups],
            nonfinite=_nonfinite(told, read[finite]),
            nonfinite_grads=_nonfinite(told, read[finite_made]),
            scaler=hasattr(optimizer, "found_inf"),
            line=line,
        )  # fmt: skip

    def _updated(self, optimizer: Any) -> None:
        """Writes which of the parameters that had not changed since the check before have other
        values after the update."""
        known = self._optimizers.get(optimizer)
        if known is None or not known.still or capturing():
            return
        still, known.still = known.still, []
        prints = Fingerprints()
        prints.add_all(parameter for _, parameter, _ in still)
        names = [n for (n, _, before), now in zip(still, prints.read()) if now != before]  # noqa: B905
        self._context.log.event("updated", step=known.step, names=names)

    def layout(
        self, optimizer: str, known: Known, named: List[Any], pieces: List[Piece]
    ) -> Optional[Tuple[int, List[Any]]]:
        """The id of what the optimizer of this class has ("": a whole model), written at first use,
        and what is known of the group of each set."""
        names = [name for _, _, name in named]
        digest = hashlib.sha1(  # noqa: S324
            "\n".join([optimizer, *names]).encode()
        ).hexdigest()[:12]
        if known.ordinal is None:
            if sum(self._ordinals.values()) + len(self._ordinals) >= _MAX_OPTIMIZERS:
                self._recorder.note_not_seen(f"laws: more than {_MAX_OPTIMIZERS} optimizers")
                return None
            owner, alike = self._owner(named[0][0]), [m for m in self._ordinals if digest in m]
            same = (m for m in alike if m in self._alive and self._alive[m]() is owner)
            known.model = next(same, f"{digest}-{len(alike)}")
            self._alive[known.model] = weakref.ref(owner)
            known.ordinal = self._ordinals[known.model] = self._ordinals.get(known.model, -1) + 1
        keys = [(piece.ranks, id(piece.group)) for piece in pieces]
        groups = {key: piece.group for key, piece in zip(keys, pieces)}  # noqa: B905
        sets = {key: at for at, key in enumerate(groups)}
        fields = {
            "optimizer": optimizer, "key": f"{known.model}.{known.ordinal}",
            "names": names, "parts": [piece.part for piece in pieces],
            "hows": [piece.how for piece in pieces], "in_set": [sets[key] for key in keys],
            "in_group": [group for _, group, _ in named], "sets": [list(r) for r, _ in sets],
            "shapes": ["x".join(map(str, local(parameter).shape)) for parameter, _, _ in named],
        }  # fmt: skip
        text = repr(fields)
        number = self._layouts.get(text)
        if number is None:
            number = self._layouts[text] = len(self._layouts)
            self._context.log.event("pieces", keep=True, id=number, **fields)
        info = self._recorder.groups.info
        return number, [None if group is None else info(group) for group in groups.values()]

    def _owner(self, parameter: Any) -> Any:
        """The model that has the parameter; the parameter itself if none is known."""
        models = (one() for _, one in self._recorder.roots)
        alive = (self._context.parts(model) for model in models if model is not None)
        return next((one.root for one in alive if id(parameter) in one.names), parameter)


def issued(known: Any) -> Optional[int]:
    """Calls on a group so far: the same on all members at the same point of the program."""
    return None if known is None else known.issued


def _gradient(parameter: Any) -> Any:
    """The local part of the gradient; None without one, or if it is laid out differently."""
    gradient = parameter.grad
    if gradient is None or not placed_alike(parameter, gradient):
        return None
    if gradient.layout == torch.sparse_coo:  # of an embedding: rows, and their numbers
        rows = gradient.detach().coalesce()
        return torch.cat([rows.indices().to(rows.dtype).flatten(), rows.values().flatten()])
    return local(gradient)


def shown_gradient(
    parameter: Any, gradient: Any, read: Optional[str], closure: bool = False
) -> Optional[str]:
    """Tells no gradient, and one of zeros, from others."""
    if not local(parameter).numel() or not parameter.requires_grad:
        return None  # in FSDP1 a shard may be on other ranks
    if parameter.grad is None:
        return None if closure else ""
    return "zero" if read is not None and read == f"{gradient.numel():x}" else read


def _state(
    optimizer: Any, parameters: List[Any]
) -> Tuple[Dict[str, List[Any]], Dict[str, List[Any]]]:
    """The tensors of the optimizer's state by name, and its numbers."""
    tensors: Dict[str, List[Any]] = {}
    plain: Dict[str, List[Any]] = {}
    for at, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter)
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                tensors.setdefault(str(name), [None] * len(parameters))[at] = value
            elif isinstance(value, (int, float)):
                plain.setdefault(f"{name} ", [None] * len(parameters))[at] = repr(value)
    return tensors, plain


def _age(optimizer: Any, parameters: List[Any]) -> float:
    """The updates that the state of an optimizer has counted; -1 if it counts none."""
    states = (optimizer.state.get(parameter) for parameter in parameters[:_FEW])
    every: List[Any] = [one.get("step") for one in states if isinstance(one, dict)]
    known = [n for n in every if isinstance(n, (int, float)) or (torch.is_tensor(n) and _plain(n))]
    return max(map(float, known), default=-1.0)


def _plain(value: Any) -> bool:
    return value.numel() == 1 and not value.is_meta


def _hyper(group: Dict[str, Any]) -> Dict[str, str]:
    """The numbers of a parameter group, as text that shows them exactly."""
    found = {}
    for name, value in group.items():
        if name == "params" or name.startswith("_"):
            continue
        if isinstance(value, torch.Tensor) and _plain(value):
            value = value.item()
        if isinstance(value, (bool, int, float, str)):
            found[str(name)] = repr(value)
        elif isinstance(value, (tuple, list)) and all(isinstance(v, (int, float)) for v in value):
            found[str(name)] = repr(tuple(value))
    return found


def _nonfinite(names: List[str], finite: List[Optional[str]]) -> List[str]:
    return [n for n, one in zip(names, finite) if one == "0"][:_MAX_NONFINITE]  # noqa: B905
