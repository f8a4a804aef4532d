"""Records, at checked steps, all parameters of a model of which the rank's optimizers have only a
part, or copies: ZeRO, and weights that are kept in float32. All of them are equal on ranks that
train one model, whoever updates them, and follow their copies.

copied      step apart[parameters that differ from DeepSpeed's copies of them]
"""

from __future__ import annotations

import weakref
from typing import Any, Dict, List, Optional, Set

from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.optimizer_checks import Known, OptimizerChecks, issued, shown_gradient
from moediag.recorder.step.numbers import Fingerprints

_MOST_ELEMENTS = 1 << 26  # of a copy: it is converted to be compared, which takes memory
_APART = 0.05  # of the norm of a copy


class WholeModels:
    """Reads each such model once in a checked step, before the first optimizer's update."""

    def __init__(self, context: LawContext, checks: OptimizerChecks) -> None:
        self._context = context
        self._checks = checks
        self._models = ByObject()  # model -> Known
        self._context.on_step.append(self._write)

    def _write(self, step: int) -> None:
        optimized = self._checks.owned()
        owned = set(map(id, optimized))
        names = self._context.names.of(optimized)
        unknown = [p for p, name in zip(optimized, names) if name is None]  # noqa: B905
        sets = self._context.sets
        for models, others in ((sets.wrapped(), None), (sets.plain_models(), unknown)):
            for model in models:
                trained = [p for p in self._context.parts(model).parameters if p.requires_grad]
                of_it = sum(id(p) in owned for p in trained)
                if self._checks.none or (of_it < len(trained) and (of_it or others)):
                    self._read(model, trained, step, owned, others)

    def _read(
        self, model: Any, trained: List[Any], step: int, owned: Set[int], unknown: Any
    ) -> None:
        """``unknown``: parameters of optimizers that are in no model; None: the model is wrapped,
        and its gradients are those of DistributedDataParallel."""
        named = [(p, 0, name) for name, p in self._context.names.known(trained)]
        parameters = [p for p, _, _ in named]
        known = self._models.get(model) or self._models.set(model, Known())
        pieces = self._context.sets.pieces(parameters)
        layout = self._checks.layout("", known, named, pieces)
        if layout is None:
            return
        prints = Fingerprints()
        values = prints.add_all(parameters)
        gradients = [None if unknown is None else p.grad for p in parameters]
        made = prints.add_all(gradients)
        if known.copies is None:
            known.copies = _copies(parameters, unknown or [])
        copies = {
            at: prints.add(copy.detach().to(parameters[at].dtype))
            for at, reference in known.copies.items()
            for copy in [reference()]
            if copy is not None and at < len(parameters)
        }
        read = prints.read()
        self._context.log.event(
            "check", pieces=layout[0], step=step, count=step - 1 if self._checks.none else 0,
            clocks=[*map(issued, layout[1])],
            params=read[values],
            grads=[
                None if unknown is None else shown_gradient(p, g, one)
                for p, g, one in zip(parameters, gradients, read[made])  # noqa: B905
            ],
            state={}, hyper=[],
            owned=[n for p, _, n in named if id(p) in owned],
            copies={at: read[place] for at, place in copies.items()},
        )  # fmt: skip
        found = [(name, _is_apart(parameter)) for parameter, _, name in named]
        if any(apart is not None for _, apart in found):
            names = [name for name, apart in found if apart]
            self._context.log.event("copied", step=step, apart=names)


def _is_apart(parameter: Any) -> Optional[bool]:
    """Whether the elements that this rank updates differ by more than rounding does from
    DeepSpeed's copy of them in float32; None without one."""
    known: Any = getattr(parameter, "_hp_mapping", None)
    copy = getattr(known, "hp_fragment", None)
    if copy is None or copy.numel() > _MOST_ELEMENTS:
        return None
    place = known.lp_fragment_address
    own = parameter.detach().reshape(-1).narrow(0, place.start, place.numel)
    return bool((own.to(copy.device, copy.dtype) - copy).norm() > _APART * copy.norm())


def _copies(parameters: List[Any], unknown: List[Any]) -> Dict[int, Any]:
    """Position -> weak reference to the only parameter of an optimizer that has the same elements,
    in the parameter's dtype. Where several parameters have the same elements, none."""
    unknown = [copy for copy in unknown if copy.numel() <= _MOST_ELEMENTS]
    prints = Fingerprints()
    own = prints.add_all(parameters)
    of_dtype = {
        dtype: prints.add_all(copy.detach().to(dtype) for copy in unknown)
        for dtype in {p.dtype for p in parameters}
    }
    read = prints.read()
    found: Dict[int, Any] = {}
    for at, (parameter, value) in enumerate(zip(parameters, read[own])):  # noqa: B905
        copies = zip(unknown, read[of_dtype[parameter.dtype]])  # noqa: B905
        alike = [copy for copy, one in copies if one == value]
        if value is not None and len(alike) == 1 and read[own].count(value) == 1:
            found[at] = weakref.ref(alike[0])
    return found
