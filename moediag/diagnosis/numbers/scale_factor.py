"""Finds gradients that are k times the reference: a sum not divided, or divided twice.

The loss and the direction are right, so loss curves show nothing. An optimizer that normalises its
step (AdamW) moves the weights correctly. Only k itself shows the error, and the mesh axis of size k
shows which division is missing or doubled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moediag.axes import AXES
from moediag.diagnosis.numbers import by_part, norms
from moediag.diagnosis.numbers.by_part import EXPERTS, INPUT, REST, ROUTER
from moediag.diagnosis.numbers.gradients import number
from moediag.evidence.model import Evidence
from moediag.protocol.tolerance import FACTOR
from moediag.records import dataclass
from moediag.result import Cell, Table
from moediag.result.wording import error_size

if TYPE_CHECKING:
    from moediag.protocol import GradientError, Outcome

PATTERN = "constant-factor"  # its part of a signature
# Relative to how far the weights have moved: an optimizer's epsilon is not scaled.
HIDDEN = 2e-2
LEAST = 4  # elements of one tensor: fewer are a multiple of anything
WORLD = "all ranks"
MICRO_BATCHES = "the micro-batches of a step"
_KINDS = (EXPERTS, ROUTER, REST, INPUT)
_WORDS = {
    EXPERTS: "the experts",
    ROUTER: "the router",
    REST: "all other parameters",
    INPUT: "the inputs of the MoE blocks",
}


@dataclass(frozen=True, slots=True)
class Size:
    """The axes of the mesh that have size k."""

    number: int
    axes: str
    """One axis, a product of axes, or WORLD."""
    inverse: bool = False
    """The size is 1/k."""
    same: tuple[str, ...] = ()
    """Other axes or products of that size."""


@dataclass(frozen=True, slots=True)
class Factor:
    """Wrong gradients of one part of the model that are a multiple of the reference."""

    kind: str
    factor: float
    """The multiple, on every rank."""
    off: float
    """Largest relative distance of any tensor on any rank from that multiple."""
    size: Size | None = None
    """None where nothing on the mesh has that size."""
    moved: float | None = None
    """How far its weights moved, relative to the reference; None where that was not measured."""
    after: int = 0
    """The step after which that was measured."""
    alone: bool = False
    """The compared model has no other part."""
    mesh: bool = True
    """The axes of the mesh are known."""
    wrong: int = 0
    """Number of parameters of that part with this multiple."""
    compared: int = 0
    """Number of its parameters whose gradient is not zero."""


@dataclass(frozen=True, slots=True)
class FactorFacts:
    """Constant factors by part of the model, experts first."""

    found: tuple[Factor, ...] = ()
    complete: bool = False
    """They explain every wrong gradient."""
    table: Table | None = None


def factor_facts(evidence: Evidence, step: int | None) -> FactorFacts:
    """The factors in ``step``, the first with a wrong gradient. None (none is wrong) means step
    1, for the table beside those of other variants."""
    by_kind = _by_kind(evidence, step or 1)
    outcomes = {r: seen.outcome for r, seen in evidence.ranks.items() if seen.outcome is not None}
    near = FACTOR.of(norms.dtype(outcomes))
    layout = evidence.layout or {WORLD: evidence.world_size}
    found: list[Factor] = []
    wrong = 0
    for kind in _KINDS:
        by_name = by_kind.get(kind, {})
        errors = [error for own in by_name.values() for error in own if error.wrong]
        wrong += bool(errors)
        one = _constant(kind, errors, near)
        if one is not None:
            size = size_of(one.factor, kind, layout, _placements(errors), near)
            moved = _moved(outcomes).get(kind)
            found.append(
                replace(
                    one, size=size, moved=moved, after=_after(outcomes), alone=len(by_kind) == 1,
                    mesh=bool(evidence.layout),
                    wrong=sum(any(e.wrong for e in own) for own in by_name.values()),
                    compared=sum(any(_counts(e) for e in own) for own in by_name.values()),
                )
            )  # fmt: skip
    if _everything(found, by_kind):
        found = [
            replace(one, size=_or_micro_batches(one.size, one.factor, outcomes, near))
            for one in found
        ]
    complete = 0 < len(found) == wrong
    compared = any(outcome.updates for outcome in outcomes.values())
    table = _table(_flat(by_kind), found, outcomes) if found or compared else None
    return FactorFacts(tuple(found), complete, table)


def _by_kind(evidence: Evidence, step: int) -> Mapping[str, Mapping[str, list[GradientError]]]:
    """Part -> parameter -> its errors on the ranks."""
    found: dict[str, dict[str, list[GradientError]]] = {}
    for what, name, error in by_part.errors(evidence, step):
        found.setdefault(what, {}).setdefault(name, []).append(error)
    return found


def _flat(
    by_kind: Mapping[str, Mapping[str, Sequence[GradientError]]],
) -> Mapping[str, list[GradientError]]:
    return {
        kind: [error for own in by_name.values() for error in own]
        for kind, by_name in by_kind.items()
    }


def _counts(error: GradientError) -> bool:
    """Whether the error is wrong, or a gradient other than zero is right."""
    return error.wrong or number(error.scale) > 0


def _everything(found: Sequence[Factor], by_kind: Mapping[str, object]) -> bool:
    """Whether the gradient of each parameter is the same multiple, as that of a loss would be."""
    kinds = {one.kind for one in found} - {INPUT}
    same = len({_digits(one.factor) for one in found}) == 1
    return (
        same and kinds == set(by_kind) - {INPUT} and all(one.wrong == one.compared for one in found)
    )


def _constant(kind: str, errors: Sequence[GradientError], near: float) -> Factor | None:
    """The common factor; None where a gradient is missing, not proportional to the reference, or
    has a different factor."""
    times = [e.times for e in errors if e.times is not None]
    if len(times) < len(errors) or all(t.numel < LEAST for t in times):
        return None
    k = _median(t.factor for t in times)
    if abs(k) < near:  # zeros are missing gradients, not multiples
        return None
    off = max(max(abs(t.factor / k - 1), t.residual) for t in times)
    return Factor(kind, k, off) if off <= near else None


# ------------------------------------------------------------------------ the mesh


def _placements(errors: Sequence[GradientError]) -> str:
    return " ".join({error.placement for error in errors})


def size_of(
    factor: float, kind: str, layout: Mapping[str, int], placements: str, near: float = 1e-3
) -> Size | None:
    """The axis, or product of axes, of size ``factor`` or 1/``factor``. Prefers fewer axes, then
    one on which the parameters do not lie, because their wrapper does not reduce over it, then,
    for experts, one that divides experts."""
    whole = {axis: n for axis, n in layout.items() if n > 1}
    inverse = abs(factor) < 1
    wanted = 1 / factor if inverse else factor
    counts = range(1, len(whole) + 1)
    products = (axes for count in counts for axes in itertools.combinations(whole, count))
    fits = [a for a in products if abs(math.prod(whole[x] for x in a) / wanted - 1) <= near]
    if not fits:
        return None
    experts_only = [axis for axis in AXES if axis.experts_only]

    def rank(axes: tuple[str, ...]) -> tuple[int, int, int]:
        lies = sum(f" on {axis}[" in placements for axis in axes)
        foreign = sum(axis not in experts_only for axis in axes) if kind == EXPERTS else 0
        return len(axes), lies, foreign

    fits.sort(key=rank)
    names = [_named(axes, whole) for axes in fits if len(axes) == len(fits[0])]
    return Size(round(wanted), names[0], inverse, tuple(names[1:]))


def _or_micro_batches(
    size: Size | None, factor: float, outcomes: Mapping[int, Outcome], near: float
) -> Size | None:
    """The size, or the number of micro-batches where that is the factor, too."""
    counts = {outcome.micro_batches for outcome in outcomes.values()}
    wanted = 1 / factor if abs(factor) < 1 else factor
    count = counts.pop() if len(counts) == 1 else 1
    if count < 2 or abs(count / wanted - 1) > near:
        return size
    same = (size.axes, *size.same) if size is not None else ()
    return Size(count, MICRO_BATCHES, abs(factor) < 1, same)


def _named(axes: tuple[str, ...], whole: Mapping[str, int]) -> str:
    return WORLD if len(axes) == len(whole) else " x ".join(axes)


# ------------------------------------------------------------------------ how far weights moved


def _after(outcomes: Mapping[int, Outcome]) -> int:
    """The last step after which weights were compared; 0 for none."""
    return max((int(step) for o in outcomes.values() for step in o.updates), default=0)


def _moved(outcomes: Mapping[int, Outcome]) -> Mapping[str, float]:
    """Part -> the median over its parameters and ranks."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes.values():
        for fqn, times in outcome.updates.get(str(_after(outcomes)), {}).items():
            found.setdefault(by_part.kind(fqn), []).append(times.factor)
    return {kind: _median(values) for kind, values in found.items()}


def _median(values: Iterable[float]) -> float:
    from statistics import median  # imports random and decimal

    return median(values)


# ------------------------------------------------------------------------ in words


def sentences(facts: FactorFacts) -> str:
    """The factors in words; "" without one."""
    together: dict[tuple[str, Size | None], list[Factor]] = {}
    for one in facts.found:
        together.setdefault((_digits(one.factor), one.size), []).append(one)
    return " ".join(text for alike in together.values() for text in _sentences(alike))


def _sentences(alike: Sequence[Factor]) -> Iterator[str]:
    first = alike[0]
    whose = [_whose(one) for one in alike]
    listed = ", ".join(whose[:-1]) + " and " + whose[-1] if len(whose) > 1 else whose[0]
    off = max(one.off for one in alike)
    text = f"The gradients of {listed} are {_digits(first.factor)} times the reference on every "
    text += f"rank (to {error_size(off)})"
    yield f"{text}; {_meaning(first)}."
    hidden = [one for one in alike if one.moved is not None and abs(one.moved - 1) <= HIDDEN]
    if hidden and len(hidden) == sum(one.moved is not None for one in alike):
        steps = "step" if first.after == 1 else "steps"
        yield (
            f"After {first.after} {steps} their weights have moved {_digits(hidden[0].moved or 0)} "
            "times as far as the reference's: the optimizer hides a constant factor, so the loss "
            "curve does not show it."
        )


def _whose(one: Factor) -> str:
    if one.wrong < one.compared:
        count = f"{one.wrong} of {one.compared}"
        if one.kind == REST:
            return f"{count} parameters" if one.alone else f"{count} other parameters"
        return f"{count} parameters of {_WORDS[one.kind]}"
    return "all parameters" if one.alone else _WORDS[one.kind]


def _meaning(one: Factor) -> str:
    size = one.size
    if size is None and not one.mesh:
        return "the number of ranks differs, and the axes of the mesh are not known"
    if size is None:
        return "no axis of the mesh, or product of axes, has that size"
    verb = "have" if size.same[1:] else "has"
    same = f" ({' and '.join(size.same)} {verb} the same)" if size.same else ""
    if size.axes == MICRO_BATCHES:
        what = f"{size.number} is the number of micro-batches of a step{same}"
    elif size.axes == WORLD:
        what = f"{size.number} is the number of ranks{same}"
    else:
        what = f"{size.number} is the size of {size.axes}{same}"
    if size.inverse:
        return f"{what}: they are divided by it once too many times"
    return f"{what}: they are summed over {size.axes} and never divided by it"


def _digits(value: float) -> str:
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.3g}"


# ------------------------------------------------------------------------ as a table

TITLE = (
    "Multiples of the single-process reference (1 is right): gradients by part of the model, how "
    "far weights have moved, last loss"
)
_COLUMNS = ("experts", "router", "others", "inputs", "experts moved", "others moved", "loss")


def _table(
    by_kind: Mapping[str, list[GradientError]],
    found: Sequence[Factor],
    outcomes: Mapping[int, Outcome],
) -> Table:
    """One row, shown below those of other variants, rounded to what fp32 reproduces elsewhere."""
    constant = {one.kind: one.factor for one in found}
    row: list[Cell] = [_of_kind(by_kind.get(kind, ()), constant.get(kind)) for kind in _KINDS]
    moved = _moved(outcomes)
    row += [None if kind not in moved else round(moved[kind], 3) for kind in (EXPERTS, REST)]
    row.append(_of_loss(list(outcomes.values())))
    return Table(TITLE, _COLUMNS, (tuple(row),))


def _of_kind(errors: Sequence[GradientError], constant: float | None) -> Cell:
    """The common factor; without one, the range from the smallest to the largest."""
    if constant is not None:
        return round(constant, 3)
    wrong = any(error.wrong for error in errors)
    factors = [e.times.factor for e in errors if e.times is not None and (e.wrong or not wrong)]
    if not factors:
        return None
    if not wrong:
        return round(_median(factors), 3)
    return f"{_digits(min(factors))} to {_digits(max(factors))}"


def _of_loss(outcomes: Sequence[Outcome]) -> Cell:
    """The mean over ranks, which have equally many tokens each."""
    last = min((min(len(o.losses), len(o.reference_losses)) for o in outcomes), default=0)
    if not last:
        return None
    mean = sum(number(o.losses[last - 1]) for o in outcomes) / len(outcomes)
    true = number(outcomes[0].reference_losses[last - 1])
    return round(mean / true, 5) if true else None
