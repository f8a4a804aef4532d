"""Groups wrong gradients by part of the model: experts, router, the rest, and what each MoE block
passes down to the layers below it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from moediag.diagnosis.numbers.gradients import number
from moediag.evidence.model import Evidence
from moediag.protocol.names import is_router
from moediag.records import dataclass
from moediag.result import Table
from moediag.result.wording import plural

if TYPE_CHECKING:
    from moediag.protocol import GradientError

EXPERTS, ROUTER, REST, INPUT = "experts", "router", "all others", "inputs of the MoE blocks"
_EXPERTS = re.compile(r"(?:^|\.)experts\.")


@dataclass(frozen=True, slots=True)
class Part:
    """Gradients of one part of the model, over all ranks."""

    kind: str
    placement: str
    """How the ranks place them on the mesh."""
    compared: int
    wrong: int
    """Number of wrong tensors, on any rank."""
    error: float
    """The largest error."""
    scale: float
    """The largest reference value."""


def kind(fqn: str) -> str:
    """EXPERTS for weights of routed experts, ROUTER for the gate's, else REST."""
    if _EXPERTS.search(fqn):
        return EXPERTS
    return ROUTER if is_router(fqn) else REST


def parts(evidence: Evidence, step: int) -> tuple[Part, ...]:
    """The parts in training step ``step`` (from 1); experts first, inputs last."""
    found: dict[tuple[str, str], dict[str, list[GradientError]]] = {}
    for what, name, error in errors(evidence, step):
        placed = found.setdefault((what, error.placement or "plain"), {})
        placed.setdefault(name, []).append(error)
    order = (EXPERTS, ROUTER, REST, INPUT)
    return tuple(
        _part(what, "" if what == INPUT else placement, by_name)
        for (what, placement), by_name in sorted(
            found.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
        )
    )


def errors(evidence: Evidence, step: int) -> Iterator[tuple[str, str, GradientError]]:
    """Of every rank: the part of the model, the FQN and the comparison with the reference."""
    for seen in evidence.ranks.values():
        if seen.outcome is None:
            continue
        for fqn, error in seen.outcome.gradients.get(str(step), {}).items():
            yield kind(fqn), fqn, error
        for block, error in seen.outcome.inputs.get(str(step), {}).items():
            yield INPUT, block, error


def _part(what: str, placement: str, by_name: Mapping[str, list[GradientError]]) -> Part:
    every = [error for listed in by_name.values() for error in listed]
    sizes = [number(error.max_abs) for error in every]
    return Part(
        what,
        placement,
        compared=len(by_name),
        wrong=sum(any(e.wrong for e in listed) for listed in by_name.values()),
        error=math.nan if any(map(math.isnan, sizes)) else max(sizes),
        scale=max(number(error.scale) for error in every),
    )


def wrong_inputs(evidence: Evidence) -> int | None:
    """The first step in which a MoE block passes a wrong gradient down; None without one."""
    steps = [
        int(step)
        for seen in evidence.ranks.values()
        if seen.outcome is not None
        for step, blocks in seen.outcome.inputs.items()
        if any(error.wrong for error in blocks.values())
    ]
    return min(steps, default=None)


def sentence(found: tuple[Part, ...]) -> str:
    """What the parts show together; "" where they add nothing to the count."""
    wrong = {part.kind for part in found if part.wrong}
    there = {part.kind for part in found}
    pieces = []
    if ROUTER in wrong and EXPERTS in there and EXPERTS not in wrong:
        pieces.append("The experts' own gradients are right, the router's are not.")
    elif EXPERTS in wrong and ROUTER in there and ROUTER not in wrong:
        pieces.append("The experts' gradients are wrong, the router's are right.")
    blocks = next((part for part in found if part.kind == INPUT and part.wrong), None)
    if blocks is not None:
        verb = "passes" if blocks.wrong == 1 else "pass"
        count = f"{blocks.wrong} of {plural(blocks.compared, 'MoE block')}"
        pieces.append(f"{count} {verb} a wrong gradient to the layers below.")
    return " ".join(pieces)


def table(found: tuple[Part, ...], step: int) -> Table:
    return Table(
        title=f"Gradients of step {step} against the single-process reference",
        columns=("of", "placement", "wrong", "compared", "largest error", "largest reference"),
        rows=tuple(
            (p.kind, p.placement or "-", p.wrong, p.compared, _short(p.error), _short(p.scale))
            for p in found
        ),
    )


def _short(value: float) -> str:
    """The value with two digits: further digits differ between machines."""
    return f"{value:.1e}" if value else "0"
