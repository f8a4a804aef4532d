"""The sentences about ranks that should hold equal values but do not, and about a wrong norm."""

from __future__ import annotations

from collections.abc import Mapping

from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.norms import WrongNorm
from moediag.diagnosis.numbers.replicas import (
    GRADIENT_NORM,
    OPTIMIZER_STATE,
    RATE,
    STEPS,
    WEIGHTS,
    Disagreement,
    ReplicaFacts,
)
from moediag.diagnosis.words.calls import sentence
from moediag.protocol import natural
from moediag.result.wording import error_size, listed, plural, ranks

_FEW = 4  # ranks that are listed one by one


def of_replicas(facts: ReplicaFacts) -> str:
    """The first disagreement, its reason and its consequence; "" without one."""
    first = facts.first
    if first is None:
        return ""
    text = _first(first, facts)
    later = _consequences(first, facts)
    return f"{text} {later}".rstrip()


def _first(d: Disagreement, facts: ReplicaFacts) -> str:
    if d.what == GRADIENT_NORM:
        return _norm(d, facts)
    if d.what in (STEPS, RATE):
        noun = "the optimizer's step count" if d.what == STEPS else "the learning rate"
        return sentence(
            f"{_in_step(d)}{noun} differs between ranks: {_values(d.values or {}, '{:g}')}"
        )
    noun = {WEIGHTS: "weights", OPTIMIZER_STATE: "optimizer's tensors"}.get(
        d.what, "gradients before clipping"
    )
    count = plural(len({fqn.split(" ")[0] for fqn in d.parameters}), "parameter")
    text = f"{_in_step(d)}the {noun} of {count} differ between ranks that hold the same slice "
    text += f"({listed(d.parameters)}); "
    part = "" if d.slice == ":" else f", slice [{d.slice}]"
    if d.size is None:
        text += f"of {d.worst} some of {ranks(d.ranks)} have a gradient and some have none"
    else:
        of = "their norm" if d.what != WEIGHTS or not d.step else "what training changed"
        text += f"worst {d.worst}{part} on {ranks(d.ranks)}: {error_size(d.size)} of {of}"
    return sentence(text)


def _in_step(d: Disagreement) -> str:
    if d.step == 0:
        return "before training "
    return f"in step {d.step} " if d.step > 1 else ""


def _norm(d: Disagreement, facts: ReplicaFacts) -> str:
    values = d.values or {}
    text = f"{_in_step(d)}the gradient norm differs between ranks: {_values(values)}"
    scope = facts.scope
    if scope.kind == "own-rows":
        what = "experts" if "experts" in scope.parameter else f"rows of {scope.parameter}"
        whose, kind = ("its own", "plain tensors") if scope.plain else ("its mesh's", "DTensors")
        text += (
            f": each rank sums only {whose} {what} ({_rows(scope.rows or {}, what)}, {kind} "
            f"in {listed(scope.parameters)}), so each clips by a different factor"
        )
    elif scope.kind == "own":
        text += (
            ": each is the norm of what that rank holds, nothing is summed over ranks, so each "
            "clips by a different factor"
        )
    else:
        text += ", so each clips by a different factor"
    text = sentence(text)
    if facts.true_norm is not None:
        whole = _digits(values).format(facts.true_norm)
        text += f" The norm of the whole gradient is {whole} (single process)."
    return text


def _rows(rows: Mapping[int, str], what: str) -> str:
    """``experts 0-3 on rank 0, 4-7 on rank 1``."""
    sides = agreement.sides(rows)
    pieces = []
    for span, members in list(sides.items())[:_FEW]:
        first, _, last = span.partition(":")
        end = natural(last)
        name = f"{first}-{end - 1}" if end is not None and first.isdecimal() else span
        pieces.append(f"{name} on {ranks(members)}")
    more = len(sides) - len(pieces)
    lead = "experts " if what == "experts" else "rows "
    return lead + ", ".join(pieces) + (f" and {more} more" if more > 0 else "")


def _values(values: Mapping[int, float], digits: str = "") -> str:
    """``rank 0 3.4007, rank 1 3.3808``; of many ranks the smallest and the largest."""
    digits = digits or _digits(values)
    if len(values) <= _FEW:
        return ", ".join(f"rank {r} {digits.format(v)}" for r, v in sorted(values.items()))
    low = min(values, key=lambda r: values[r])
    high = max(values, key=lambda r: values[r])
    return (
        f"from {digits.format(values[low])} (rank {low}) to {digits.format(values[high])} "
        f"(rank {high}) on {len(values)} ranks"
    )


def _digits(values: Mapping[int, float]) -> str:
    """The fewest digits that show the difference."""
    for digits in ("{:.4f}", "{:.6f}"):
        if len({digits.format(v) for v in values.values()}) == len(set(values.values())):
            return digits
    return "{:.9g}"


def _consequences(first: Disagreement, facts: ReplicaFacts) -> str:
    """Weights that drift apart afterwards, the lasting consequence."""
    if first.what == WEIGHTS:
        return ""
    drifted = [d for d in facts.found if d.what == WEIGHTS]
    if drifted:
        last = drifted[-1]
        return sentence(
            f"after step {last.step} the weights of {plural(len(last.parameters), 'parameter')} "
            f"differ between replicas, by up to {error_size(last.size)} of what training changed"
        )
    return ""


def of_wrong_norm(wrong: WrongNorm) -> str:
    times = wrong.norm / wrong.true if wrong.true else float("inf")
    where = f"in step {wrong.step} " if wrong.step > 1 else ""
    return sentence(
        f"{where}the norm used for clipping is {times:.4g} times the true one on every rank "
        f"({wrong.norm:.4f}, single process {wrong.true:.4f}), although the gradients before "
        "clipping are right: what the optimizer gets is scaled by a different factor"
    )
