"""Finds decisions on which ranks differed before their schedules diverged.

A schedule shows that rank 1 reached another collective. Only the program knows that rank 1
skipped ``optimizer.step()`` because its gradient norm was not finite; it reports that through
:func:`moediag.recorder.decision`. Only decisions that at least two ranks reported are compared: a
rank that stopped earlier decided nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.evidence.model import Decision, Evidence
from moediag.records import dataclass
from moediag.result import Table
from moediag.result.wording import does, plural, ranks

Value = float | str | tuple[str, ...]

TABLE = "Branches that ranks took apart"
_FEW = 3  # sides of one decision that a sentence names


@dataclass(frozen=True, slots=True)
class Parted:
    """One decision on which ranks differed."""

    what: str
    step: int
    values: Mapping[int, Value]
    """The branch of each rank that reported the decision."""


def parted(evidence: Evidence) -> tuple[Parted, ...]:
    """All such decisions of the trial, by step, in the order in which a rank took them."""
    told: dict[tuple[int, str, int], dict[int, Value]] = {}
    for rank, seen in sorted(evidence.ranks.items()):
        count: dict[tuple[int, str], int] = {}
        for one in seen.decisions:
            nth = count[one.step, one.what] = count.get((one.step, one.what), 0) + 1
            told.setdefault((one.step, one.what, nth), {})[rank] = one.value
    found = (Parted(what, step, values) for (step, what, _), values in told.items())
    apart = (p for p in found if len(set(p.values.values())) > 1)
    return tuple(sorted(apart, key=lambda one: one.step))


def before(
    every: Sequence[Parted], evidence: Evidence, divergence: Divergence | None, last: int | None
) -> tuple[Parted, ...]:
    """The decisions that explain a failure: those of the latest step that has any, before each
    rank's side of ``divergence``. Without one: of the steps up to ``last`` (None: all)."""
    if divergence is not None:
        limits = {r: call.time for r, call in divergence.calls.items() if call is not None}
        earlier = [p for p in every if not _after(p, evidence, limits)]
    else:
        earlier = [p for p in every if last is None or p.step <= last]
    latest = max((p.step for p in earlier), default=None)
    return tuple(p for p in earlier if p.step == latest)


def _after(one: Parted, evidence: Evidence, limits: Mapping[int, float]) -> bool:
    """Whether some rank decided only after its call (both times are from the rank's clock)."""
    for rank, limit in limits.items():
        seen = evidence.ranks.get(rank)
        of_rank: Iterator[Decision] = (
            d
            for d in (seen.decisions if seen is not None else ())
            if (d.what, d.step) == (one.what, one.step)
        )
        first = next(of_rank, None)
        if first is not None and first.time > limit > 0:
            return True
    return False


def sentence(found: Sequence[Parted], of_divergence: bool, step: int | None) -> str:
    """``Before it, rank 1 skipped optimizer.step() (…), rank 0 took optimizer.step().``; "" for
    no decision. ``of_divergence``: they precede a divergence, else the failure in ``step``."""
    if not found:
        return ""
    lead = "In that step" if found[0].step == step else f"In step {found[0].step}"
    lead = "Before it" if of_divergence else lead
    return f"{lead}, {'; '.join(_piece(one) for one in found)}."


def _piece(one: Parted) -> str:
    sides = list(agreement.sides(one.values).items())
    if all(isinstance(value, tuple) for value, _ in sides):
        return _names(one, sides)
    # What most ranks did comes last: the reader looks for the exception.
    sides.sort(key=lambda side: (len(side[1]), -side[1][0]))
    texts = [does(who, _said(one.what, value)) for value, who in sides[:_FEW]]
    more = len(sides) - _FEW
    return ", ".join(texts) + (f" and {plural(more, 'more branch')}" if more > 0 else "")


def _said(what: str, value: Value) -> str:
    """What one rank did, from the verb on."""
    if isinstance(value, tuple):
        return f"has {what} {_cell(value)}"
    return f"has {_cell(value)} {what}" if isinstance(value, float) else value


def _names(one: Parted, sides: list[tuple[Value, tuple[int, ...]]]) -> str:
    listed = [(tuple(v), who) for v, who in sides if isinstance(v, tuple)]
    every = dict.fromkeys(name for names, _ in listed for name in names)
    lacking: dict[str, list[int]] = {}
    for names, who in listed:
        for name in every:
            if name not in names:
                lacking.setdefault(name, []).extend(who)
    if not lacking:
        orders = [f"{', '.join(names)} on {ranks(who)}" for names, who in listed[:_FEW]]
        return f"the {one.what}s came in another order: {'; '.join(orders)}"
    texts = [
        does(without, f"has no {one.what} `{name}`")
        for name, without in list(lacking.items())[:_FEW]
    ]
    more = len(lacking) - _FEW
    return ", ".join(texts) + (f" and {more} more are not on all ranks" if more > 0 else "")


def table(every: Sequence[Parted]) -> Table | None:
    """One row per branch with the ranks that took it; None where all ranks took the same."""
    steps: dict[tuple[str, str, str], list[int]] = {}
    for one in every:
        for value, who in agreement.sides(one.values).items():
            steps.setdefault((one.what, _cell(value), ranks(who)), []).append(one.step)
    rows = tuple((_listed(numbers), *branch) for branch, numbers in steps.items())
    return Table(TABLE, ("in step", "decision", "branch", "taken by"), rows) if rows else None


def _listed(steps: Sequence[int]) -> str:
    if len(steps) > 2 and len(steps) == steps[-1] - steps[0] + 1:
        return f"{steps[0]} to {steps[-1]}"
    few = ", ".join(str(step) for step in steps[:_FEW])
    return f"{few} and {len(steps) - _FEW} more" if len(steps) > _FEW else few


def _cell(value: Value) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else value
