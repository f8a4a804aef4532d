"""Records, at checked steps, all parameters of a model of which the rank's optimizers have only a
part, or copies: ZeRO, and weights that are kept in float32. All of them are equal on ranks that
train one model, whoever updates them, and follow their copies.

copied      step compared(parameters of which DeepSpeed has copies)
            apart[those that differ from them by more than rounding does]
"""

from __future__ import annotations

import weakref
from typing import Any, Dict, List, Optional, Set

from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.optimizer_checks import Known, OptimizerChecks, shown_gradient
from moediag.recorder.step.numbers import Fingerprints
from moediag.recorder.step.pieces import local

_MOST_ELEMENTS = 1 << 26  # of a copy: it is converted to be compared, which takes memory
_APART = 0.05  # of the norm of a copy


class _Model(Known):
    """What is known of one model."""

    __slots__ = ("copies",)

    def __init__(self) -> None:
        super().__init__()
        # Position -> weak reference to the optimizer's copy of the parameter; None: not yet read.
        self.copies: Optional[Dict[str, Any]] = None


class WholeModels:
    """Reads each such model once in a checked step, before the first optimizer's update."""

    def __init__(self, context: LawContext, checks: OptimizerChecks) -> None:
        self._context = context
        self._checks = checks
        self._models = ByObject()  # model -> _Model

    def install(self) -> None:
        self._context.on_step.append(self._write)

    def _write(self, step: int) -> None:
        optimized = self._checks.owned()
        owned = set(map(id, optimized))
        names = self._context.names.of(optimized)
        unknown = [p for p, name in zip(optimized, names) if name is None]  # noqa: B905
        wrapped, plain = self._context.sets.wrapped(), self._context.sets.plain_models()
        for model in [*wrapped, *plain]:
            trained = [p for p in model.parameters() if p.requires_grad]
            of_it = sum(id(p) in owned for p in trained)
            if model in wrapped and (self._checks.none or 0 < of_it < len(trained)):
                self._read(model, trained, step, owned)
            part = of_it < len(trained) and (of_it or unknown)
            if model not in wrapped and (self._checks.none or part):
                self._read(model, trained, step, owned, unknown)

    def _read(
        self, model: Any, trained: List[Any], step: int, owned: Set[int], unknown: Any = None
    ) -> None:
        """``unknown``: parameters of optimizers that are in no model; None: the model is wrapped,
        and its gradients are those of DistributedDataParallel."""
        names = self._context.names.of(trained)
        named = [(p, 0, n) for p, n in zip(trained, names) if n is not None]  # noqa: B905
        parameters = [p for p, _, _ in named]
        known = self._models.get(model) or self._models.set(model, _Model())
        pieces = self._context.sets.pieces(parameters)
        layout = self._checks.layout("", known, named, pieces)
        if layout is None:
            return
        prints = Fingerprints()
        places = [prints.add(local(p)) for p in parameters]
        gradients = [None if unknown is None else p.grad for p in parameters]
        of_gradients = [None if g is None else prints.add(g) for g in gradients]
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
            clocks=[self._checks.clock(group) for group in layout[1]],
            params=[read[at] for at in places],
            grads=[
                None if unknown is None else shown_gradient(p, g, None if at is None else read[at])
                for p, g, at in zip(parameters, gradients, of_gradients)  # noqa: B905
            ],
            state={}, hyper=[],
            owned=[n for p, _, n in named if id(p) in owned],
            copies={at: read[place] for at, place in copies.items()},
        )  # fmt: skip
        with_copies = [(n, _is_apart(p)) for p, _, n in named if _copy_of(p) is not None]
        if with_copies:
            apart = [name for name, differs in with_copies if differs]
            self._context.log.event("copied", step=step, compared=len(with_copies), apart=apart)


def _copy_of(parameter: Any) -> Any:
    """DeepSpeed's copy in float32 of the elements that this rank updates; None without one."""
    copy = getattr(getattr(parameter, "_hp_mapping", None), "hp_fragment", None)
    return None if copy is None or copy.numel() > _MOST_ELEMENTS else copy.detach()


def _is_apart(parameter: Any) -> bool:
    copy, place = _copy_of(parameter), parameter._hp_mapping.lp_fragment_address
    own = parameter.detach().reshape(-1).narrow(0, place.start, place.numel)
    return bool((own.to(copy.device, copy.dtype) - copy).norm() > _APART * copy.norm())


def _copies(parameters: List[Any], unknown: List[Any]) -> Dict[int, Any]:
    """Position -> weak reference to the only parameter of an optimizer that has the same elements,
    in the parameter's dtype. Where several parameters have the same elements, none."""
    unknown = [copy for copy in unknown if copy.numel() <= _MOST_ELEMENTS]
    prints = Fingerprints()
    own = [prints.add(local(p)) for p in parameters]
    of_dtype = {
        dtype: [prints.add(copy.detach().to(dtype)) for copy in unknown]
        for dtype in {p.dtype for p in parameters}
    }
    read = prints.read()
    found: Dict[int, Any] = {}
    for at, parameter in enumerate(parameters):
        value = read[own[at]]
        alike = [copy for copy, place in zip(unknown, of_dtype[parameter.dtype])  # noqa: B905
                 if read[place] == value]  # fmt: skip
        if value is not None and len(alike) == 1 and [read[one] for one in own].count(value) == 1:
            found[at] = weakref.ref(alike[0])
    return found
