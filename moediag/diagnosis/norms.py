"""The norm that scales the gradients: what each rank's covers, and whether it is the true one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moediag.diagnosis.gradients import number
from moediag.protocol import Outcome, Sketch

# A norm that is the same on all ranks against the reference's, relative.
TRUE_NORM = {"float32": 1e-2, "bfloat16": 2e-1}
_SCOPE = 1e-4  # relative: "this is the norm of the rank's own pieces"


@dataclass(frozen=True, slots=True)
class NormScope:
    """What each rank's gradient norm covers. ``kind``: ``own`` (its own pieces alone), ``own-rows``
    (everything, but of plain tensors its own rows only) or "" (not known). ``rows``: rank -> the
    rows of ``parameter`` that it holds, the first of ``parameters`` of which ranks hold others."""

    kind: str = ""
    parameter: str = ""
    parameters: tuple[str, ...] = ()
    rows: Mapping[int, str] | None = None


@dataclass(frozen=True, slots=True)
class WrongNorm:
    """Equal on all ranks, and not the reference's, in the first such step."""

    step: int
    norm: float
    true: float


def dtype(outcomes: Mapping[int, Outcome]) -> str:
    """``float32``, or ``bfloat16`` for whatever is rounded more."""
    found = {facts.dtype for o in outcomes.values() for facts in o.replicas.values()}
    return "float32" if found <= {"float32"} else "bfloat16"


def of_step(outcome: Outcome, step: int) -> float | None:
    return outcome.gradient_norms[step - 1] if len(outcome.gradient_norms) >= step else None


def reference(outcomes: Mapping[int, Outcome], step: int) -> float | None:
    listed = (o.reference_norms for o in outcomes.values())
    return next((norms[step - 1] for norms in listed if len(norms) >= step), None)


def wrong(outcomes: Mapping[int, Outcome], steps: int) -> WrongNorm | None:
    """The caller knows that all ranks have the same."""
    for step in range(1, steps + 1):
        true = reference(outcomes, step)
        norms = [n for o in outcomes.values() if (n := of_step(o, step)) is not None]
        if not norms or true is None or not math.isfinite(number(norms[0])):
            continue
        if abs(number(norms[0]) - true) > TRUE_NORM[dtype(outcomes)] * true:
            return WrongNorm(step, number(norms[0]), true)
    return None


def scope(outcomes: Mapping[int, Outcome], step: int, norms: Mapping[int, float]) -> NormScope:
    """Found by arithmetic: which part of the gradient gives each rank's norm."""
    facts = {r: o.replicas.get(str(step)) for r, o in outcomes.items()}
    rows: dict[str, dict[int, str]] = {}
    own: dict[int, float] = {}
    for rank, of_rank in facts.items():
        for fqn, replica in (of_rank.parameters if of_rank is not None else {}).items():
            if replica.kind == "plain" and replica.slice != ":":
                rows.setdefault(fqn, {})[rank] = replica.slice.split(",")[0]
                own[rank] = own.get(rank, 0.0) + size(replica.gradient) ** 2
    rows = {fqn: by for fqn, by in rows.items() if len(set(by.values())) > 1}
    largest = max(norms.values()) ** 2
    if rows and set(own) == set(norms):
        rest = [norms[r] ** 2 - own[r] for r in own]
        spread = max(rest) - min(rest)
        # Without its own rows every rank would have the same norm: they explain the difference.
        if spread <= _SCOPE * largest and spread < 0.1 * (largest - min(norms.values()) ** 2):
            fqn = next(iter(rows))
            return NormScope("own-rows", fqn, tuple(rows), rows[fqn])
    alone = {
        r: f.local_norm for r, f in facts.items() if f is not None and f.local_norm is not None
    }
    if set(alone) == set(norms) and all(
        abs(number(alone[r]) - v) <= _SCOPE * v for r, v in norms.items()
    ):
        return NormScope("own")
    return NormScope()


def size(sketch: Sketch | None) -> float:
    """The L2 norm; 0 without a tensor or where it is not finite."""
    norm = 0.0 if sketch is None else number(sketch.norm)
    return norm if math.isfinite(norm) else 0.0
