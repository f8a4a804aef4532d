"""Parameters of an optimizer are finite: they were initialised, and stay finite."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.absent_gradients import of_zeros
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.diagnosis.laws.optimizer_checks import Checks, long, optimizers
from moediag.evidence.law_model import (
    NO_GRADIENT,
    LawCheck,
    plain_names,
)
from moediag.result import Verdict
from moediag.result.wording import at_line, listed, ranks

_MOST_NAMES = 20  # that a check lists


@law(Verdict.NONFINITE)
def parameters_not_finite(facts: Facts) -> Findings:
    """Parameters of a watched job became nan or infinite."""
    every = [one for one in map(_not_finite, facts.of(optimizers)) if one]
    if not every:
        return
    found = min(every, key=lambda rows: rows[0][2].step)
    of_ranks = [[n for n in new.nonfinite if n not in old.nonfinite] for _, old, new in found]
    names = dict.fromkeys(name for of in of_ranks for name in of)
    grads = dict.fromkeys(name for _, old, _ in found for name in old.nonfinite_grads)
    already = dict.fromkeys(name for _, old, _ in found for name in old.nonfinite)
    first, before = found[0][2], max(old.step for _, old, _ in found)
    text = (
        f"When the optimizer{at_line(first.line)} stepped in step {first.step}, {listed(names)} "
        f"had elements that are not finite, on {ranks(rank for rank, _, _ in found)}; in step "
        f"{before} they were finite."
    )
    if grads:
        text += f" In step {before} the gradient of {listed(grads)} was not finite."
    if already:
        text += f" {listed(already)} had elements that are not finite before that."
    rows = (checks for of in facts.of(optimizers) for checks in of.values())
    later = [check for checks in rows for check in checks if check.step >= first.step]
    # A scaler that overflows once is healthy.
    overflows = {check.step for check in later if check.nonfinite_grads}
    spread = bool(grads) or overflows == {check.step for check in later}
    seen = any(grad not in (None, NO_GRADIENT) for check in later for grad in check.grads)
    if seen and not spread and len(names) < _MOST_NAMES:
        # An expert that is pruned by a bias of -inf, for example: no gradient is affected.
        yield Suspicious(f"{text} All gradients are finite, so it may be intended.", tuple(names))
        return
    yield Broken(
        text,
        pattern="parameters",
        next_step="Run again with `--laws-every 1` to see which gradient is the first one.",
        lasting=True,
        names=tuple(names),
    )


def _not_finite(of: Checks) -> list[tuple[int, LawCheck, LawCheck]]:
    """The ranks on which it shows first, the last check at which parameters were finite, and the
    next one. Before the first check, they may be meant so."""
    found = []
    for rank, checks in of.items():
        for earlier, check in pairwise(checks):
            known = len(earlier.nonfinite) < _MOST_NAMES  # else some may be left out
            if known and set(check.nonfinite) - set(earlier.nonfinite):
                found.append((rank, earlier, check))
                break
    first = min((check.step for _, _, check in found), default=0)
    return [one for one in found if one[2].step == first]


@law(suspects=True)
def parameters_not_initialised(facts: Facts) -> Findings:
    """Parameters were not finite before the first update, or nothing was written into them or into
    buffers that `to_empty` made. Those of zeros count if they only had gradients of zeros."""
    every = facts.of(recorded).values()
    kinds: dict[str, Callable[[Any], Any]] = {"names": plain_names, "zeros": plain_names}
    rows = [own.rows("unwritten", line=str, **kinds) for own in every]
    if rows and all(rows):  # else other ranks may send them
        dead = {
            name for of in long(facts) for name in set.intersection(*map(of_zeros, of.values()))
        }
        found = [{*names, *(dead & {*zeros})} for ((_, names, zeros), *_) in rows]
        line, names, zeros = rows[0][0]
        unwritten = [name for name in (*names, *zeros) if all(name in one for one in found)]
        if unwritten:
            yield Suspicious(
                f"Nothing was written into {listed(unwritten)} between to_empty{at_line(line)} and "
                "the first update, on any rank: they hold what the memory had before. Initialise "
                "or load all parameters, and compute buffers that are not saved again."
                + " Zeros written by way of .data look alike; these have gradients of zeros only."
                * any(name in dead for name in unwritten),
                tuple(unwritten),
            )
    firsts = (checks[0] for of in facts.of(optimizers) for checks in of.values())
    names = dict.fromkeys(n for check in firsts if check.count == 0 for n in check.nonfinite)
    if names:
        yield (
            f"Before the first update, {listed(names)} had elements that are not finite: "
            "they may never have been initialised."
        )
