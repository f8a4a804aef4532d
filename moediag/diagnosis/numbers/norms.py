"""The norm that scales the gradients: what each rank's norm covers, and whether it is correct."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from moediag.diagnosis.numbers.gradients import number
from moediag.protocol.tolerance import TRUE_NORM
from moediag.records import dataclass

if TYPE_CHECKING:
    from moediag.protocol import Outcome, Replica, Sketch, StepReplicas

_RANGE = re.compile(r"\d+:\d+")
_SCOPE = 1e-4  # relative: "this is the norm of the rank's own pieces"


@dataclass(frozen=True, slots=True)
class NormScope:
    """What each rank's gradient norm covers."""

    kind: str = ""
    """``own`` (its own pieces), ``own-rows`` (everything, but only its own rows or its mesh's of
    some tensors) or "" (not known)."""
    parameter: str = ""
    """The first of ``parameters``."""
    parameters: tuple[str, ...] = ()
    """Parameters of which ranks cover different rows."""
    rows: Mapping[int, str] | None = None
    """Rank -> the rows of ``parameter`` that it covers."""
    plain: bool = True
    """They are plain tensors."""


@dataclass(frozen=True, slots=True)
class WrongNorm:
    """A norm that is equal on all ranks but not to the reference's, in the first such step."""

    step: int
    norm: float
    true: float


def dtype(outcomes: Mapping[int, Outcome]) -> str:
    """``float32``, or ``bfloat16`` for every dtype that rounds more."""
    found = {facts.dtype for o in outcomes.values() for facts in o.replicas.values()}
    return "float32" if found <= {"float32"} else "bfloat16"


def of_step(outcome: Outcome, step: int) -> float | None:
    return outcome.gradient_norms[step - 1] if len(outcome.gradient_norms) >= step else None


def reference(outcomes: Mapping[int, Outcome], step: int) -> float | None:
    listed = (o.reference_norms for o in outcomes.values())
    return next((norms[step - 1] for norms in listed if len(norms) >= step), None)


def wrong(outcomes: Mapping[int, Outcome], steps: int) -> WrongNorm | None:
    """The common norm of all ranks where it is wrong. The caller checked that the ranks agree."""
    for step in range(1, steps + 1):
        true = reference(outcomes, step)
        norms = [n for o in outcomes.values() if (n := of_step(o, step)) is not None]
        if not norms or true is None or not math.isfinite(number(norms[0])):
            continue
        if abs(number(norms[0]) - true) > TRUE_NORM.of(dtype(outcomes)) * true:
            return WrongNorm(step, number(norms[0]), true)
    return None


def scope(outcomes: Mapping[int, Outcome], step: int, norms: Mapping[int, float]) -> NormScope:
    """What the norms cover, calculated: which part of the gradient gives each rank's norm."""
    facts = {r: o.replicas.get(str(step)) for r, o in outcomes.items()}
    covered = _covered(facts)
    own: dict[int, float] = {}
    for covers in covered.values():
        for rank, cover in covers.items():
            own[rank] = own.get(rank, 0.0) + cover.square
    largest = max(norms.values()) ** 2
    if covered and set(own) == set(norms):
        rest = [norms[r] ** 2 - own[r] for r in own]
        spread = max(rest) - min(rest)
        # Without its own rows every rank would have the same norm: the rows explain the difference.
        if spread <= _SCOPE * largest and spread < 0.1 * (largest - min(norms.values()) ** 2):
            fqn, covers = next(iter(covered.items()))
            rows = {r: cover.rows for r, cover in covers.items()}
            plain = all(cover.plain for cover in covers.values())
            return NormScope("own-rows", fqn, tuple(covered), rows, plain)
    alone = {
        r: f.local_norm for r, f in facts.items() if f is not None and f.local_norm is not None
    }
    if set(alone) == set(norms) and all(
        abs(number(alone[r]) - v) <= _SCOPE * v for r, v in norms.items()
    ):
        return NormScope("own")
    return NormScope()


@dataclass(frozen=True, slots=True)
class _Cover:
    """What one rank's norm can cover of one parameter."""

    rows: str  # of dim 0, as text
    square: float  # of the norm of their gradient
    plain: bool


def _covered(facts: Mapping[int, StepReplicas | None]) -> dict[str, dict[int, _Cover]]:
    """FQN -> rank -> what it covers, for parameters of which ranks cover different rows: plain
    tensors in part, and DTensors on several meshes that each have their own rows."""
    pieces: dict[str, dict[int, Replica]] = {}
    for rank, of_rank in facts.items():
        for fqn, replica in (of_rank.parameters if of_rank is not None else {}).items():
            pieces.setdefault(fqn, {})[rank] = replica
    found: dict[str, dict[int, _Cover]] = {}
    for fqn, by_rank in pieces.items():
        covers: dict[int, _Cover] = {}
        for rank, replica in by_rank.items():
            plain = replica.kind == "plain"
            if plain and replica.slice == ":":
                continue
            mesh = [replica] if plain else [x for x in by_rank.values() if x.kind == replica.kind]
            rows = _joined({x.slice.split(",")[0] for x in mesh})
            covers[rank] = _Cover(rows, sum(size(x.gradient) ** 2 for x in mesh), plain)
        if len({cover.rows for cover in covers.values()}) > 1:
            found[fqn] = covers
    return found


def _joined(spans: Iterable[str]) -> str:
    """``0:2`` and ``2:4`` give ``0:4``; rows that are not one range are listed."""
    listed = sorted(spans)
    if not all(map(_RANGE.fullmatch, listed)):
        return "+".join(listed)
    bounds = sorted((int(a), int(b)) for a, _, b in (span.partition(":") for span in listed))
    if any(a[1] != b[0] for a, b in itertools.pairwise(bounds)):
        return "+".join(f"{first}:{last}" for first, last in bounds)
    return f"{bounds[0][0]}:{bounds[-1][1]}"


def size(sketch: Sketch | None) -> float:
    """The L2 norm; 0 without a tensor or where it is not finite."""
    norm = 0.0 if sketch is None else number(sketch.norm)
    return norm if math.isfinite(norm) else 0.0
