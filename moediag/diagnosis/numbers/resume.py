"""Whether training after a save and a load equals uninterrupted training, and what was lost.

Two comparisons: the state after loading with the saved state, bit by bit, and the steps after the
save with those of an uninterrupted run. The second is inconclusive where two uninterrupted runs
already differ; the first needs no such control.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moediag.diagnosis.numbers import resumed_run
from moediag.diagnosis.numbers.expert_holders import numbers
from moediag.diagnosis.numbers.lost_in_resume import by, by_parameter, most, what_is_lost
from moediag.evidence.model import Evidence
from moediag.records import dataclass
from moediag.result import Cell, Confidence, Table, Verdict
from moediag.result.wording import error_size, listed, plural

if TYPE_CHECKING:
    from moediag.protocol import ResumeOutcome

OUTSIDE = "outside-the-state"
_STATE = ("weights", "optimizer")
# Where the layout changed: one, and several.
_IN_MEMORY = ("run that got the same state in memory", "runs from the same state in memory")


@dataclass(frozen=True, slots=True)
class ResumeFacts:
    """What a resume trial shows."""

    verdict: Verdict | None = None
    """None without a resume trial."""
    confidence: Confidence = Confidence.HIGH
    text: str = ""
    pattern: str = ""
    """OUTSIDE or a pattern of ``lost_in_resume``; "" where nothing drifted."""
    tables: tuple[Table, ...] = ()
    """The numbers behind it."""
    next_step: str = ""
    notes: tuple[str, ...] = ()


def resume_facts(evidence: Evidence) -> ResumeFacts:
    """The facts if every rank reached its end: a rank without numbers may have drifted."""
    own = {
        rank: seen.outcome.resumed
        for rank, seen in sorted(evidence.ranks.items())
        if seen.outcome is not None and seen.outcome.resumed is not None
    }
    if own:
        said = resumed_run.said(own)
        return ResumeFacts(
            said.verdict, said.confidence, said.text, said.pattern, resumed_run.tables(own),
            said.next_step, said.notes,
        )  # fmt: skip
    found = {
        rank: seen.outcome.resume
        for rank, seen in sorted(evidence.ranks.items())
        if seen.outcome is not None and seen.outcome.resume is not None
    }
    if not found or len(found) < evidence.world_size:
        return ResumeFacts()
    some = next(iter(found.values()))
    noise = max(map(_noise, found.values()))
    drift = {rank: _Drift.of(outcome) for rank, outcome in found.items()}
    pattern, cause = what_is_lost(found)
    drifted = any(d.some for d in drift.values())
    tables = (_steps(found), _ends(found), *_experts(found))
    if pattern:
        steps = _told(drift, some) if not noise else _no_control(noise, some)
        sure = Confidence.MEDIUM if noise else Confidence.HIGH
        return ResumeFacts(Verdict.RESUME_DRIFT, sure, f"{cause} {steps}", pattern, tables)
    if noise:
        text = f"Loading restored every tensor bit for bit. {_no_control(noise, some)}"
        return ResumeFacts(Verdict.INCONCLUSIVE, Confidence.LOW, text, tables=tables)
    if drifted:
        text = "Every tensor of model and optimizer was restored bit for bit, and the steps still "
        text += f"differ: something else they depend on was not saved. {_told(drift, some)}"
        return ResumeFacts(Verdict.RESUME_DRIFT, Confidence.HIGH, text, OUTSIDE, tables)
    return ResumeFacts(Verdict.CLEAN, Confidence.HIGH, _clean(some), tables=tables)


# ------------------------------------------------------------------------ how far


@dataclass(frozen=True, slots=True)
class _Drift:
    """Largest differences on one rank in the steps after the save, and of the final state."""

    loss: float
    norm: float
    weights: float
    optimizer: float

    @classmethod
    def of(cls, outcome: ResumeOutcome) -> _Drift:
        straight, resumed, after = outcome.straight, outcome.resumed, outcome.after
        return cls(
            _apart(straight.losses[after:], resumed.losses),
            _apart(straight.norms[after:], resumed.norms),
            most(outcome.at_end.weights.values()),
            most(outcome.at_end.optimizer.values()),
        )

    @property
    def some(self) -> bool:
        return any((self.loss, self.norm, self.weights, self.optimizer))


def _apart(one: Sequence[float | None], other: Sequence[float | None]) -> float:
    """The largest difference: 0 where all are equal; infinite for a nan or a missing value."""
    if len(one) != len(other):
        return math.inf
    return most(_gap(a, b) for a, b in zip(one, other, strict=True))


def _gap(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return 0.0 if a is b else None
    return abs(float(a) - float(b))


def _noise(outcome: ResumeOutcome) -> float:
    """The difference between two uninterrupted runs."""
    straight, again = outcome.straight, outcome.again
    return max(
        _apart(straight.losses, again.losses),
        _apart(straight.norms, again.norms),
        max(most(outcome.control.weights.values()), most(outcome.control.optimizer.values())),
    )


# ------------------------------------------------------------------------ words and tables


def _span(outcome: ResumeOutcome) -> str:
    first, last = outcome.after + 1, len(outcome.straight.losses)
    if first >= last:
        return f"step {last}"
    return f"steps {first} {'and' if last == first + 1 else 'to'} {last}"


def _told(drift: Mapping[int, _Drift], outcome: ResumeOutcome) -> str:
    span = _span(outcome)
    text = span[:1].upper() + span[1:]
    one = span.startswith("step ")
    if not any(d.some for d in drift.values()):
        return f"{text} still {'matches' if one else 'match'} {_other(outcome)}."
    loss, norm, weights = (
        error_size(max(getattr(d, name) for d in drift.values()))
        for name in ("loss", "norm", "weights")
    )
    return (
        f"{text} then {'differs' if one else 'differ'} from {_other(outcome)}: the loss by up "
        f"to {loss}, the gradient norm by {norm}, the weights at the end by {weights}; two "
        f"{_others(outcome)} differ by 0."
    )


def _no_control(noise: float, outcome: ResumeOutcome) -> str:
    text = f"Two {_others(outcome)} already differ {by(noise)}, so the steps after the save prove "
    return f"{text}nothing."


def _other(outcome: ResumeOutcome) -> str:
    """What the steps after the save are compared with."""
    return f"the {_IN_MEMORY[0] if outcome.layout else 'uninterrupted run'}"


def _others(outcome: ResumeOutcome) -> str:
    return _IN_MEMORY[1] if outcome.layout else "uninterrupted runs"


def _clean(outcome: ResumeOutcome) -> str:
    where = f" at {outcome.layout}" if outcome.layout else ""
    text = f"After saving and loading{where}, {plural(outcome.at_load.compared, 'tensor')} of "
    text += f"model and optimizer equal those at the save on every rank, and {_span(outcome)} "
    text += f"exactly those of {_other(outcome)} "
    return f"{text}(loss, gradient norm, weights, optimizer: difference 0)."


def _steps(found: Mapping[int, ResumeOutcome]) -> Table:
    """The steps after the save: those before carry no information."""
    rows: list[tuple[Cell, ...]] = []
    some = next(iter(found.values()))
    total = len(some.straight.losses)
    for step in range(some.after, total):
        for rank, one in found.items():
            here = step - one.after
            rows.append(
                (
                    step + 1,
                    rank,
                    *_side_by_side(one.straight.losses, one.resumed.losses, step, here),
                    *_side_by_side(one.straight.norms, one.resumed.norms, step, here),
                )
            )
    return Table(
        title=f"{total} steps against {some.after} + {total - some.after}",
        columns=(
            "step", "rank", "loss", "loss resumed", "difference",
            "norm", "norm resumed", "difference",
        ),
        rows=tuple(rows),
        note="Norm: of the rank's own part of the gradient.",
    )  # fmt: skip


def _ends(found: Mapping[int, ResumeOutcome]) -> Table:
    """The state at the end of the resumed run, and how far two runs without a save differ."""
    rows, some = [], next(iter(found.values()))
    others = _others(some)
    for rank, one in found.items():
        ends = (one.at_load, one.at_end)
        states = [most(getattr(end, name).values()) for end in ends for name in _STATE]
        rows.append((rank, *states, _noise(one)))
    return Table(
        title=f"Largest differences of the state, and of two {others}",
        columns=(
            "rank", "weights loaded", "optimizer loaded", "weights at the end",
            "optimizer at the end", f"two {others}",
        ),
        rows=tuple(rows),
        note=f"Loaded: from the state at the save; at the end: from {_other(some)}.",
    )  # fmt: skip


def _side_by_side(
    straight: Sequence[float | None], resumed: Sequence[float | None], step: int, here: int
) -> tuple[float | None, float | None, float | None]:
    one = straight[step] if step < len(straight) else None
    other = resumed[here] if here < len(resumed) else None
    return one, other, _gap(one, other) if one is not None and other is not None else None


def _experts(found: Mapping[int, ResumeOutcome]) -> tuple[Table, ...]:
    """One row per rank where all expert parameters agree, else one per rank and parameter; no
    table without such parameters."""
    alike: dict[str, list[str]] = {}
    cells: dict[str, list[tuple[Cell, ...]]] = {}
    for fqn, rows in by_parameter(found).items():
        cells[fqn] = [
            (rank, numbers(row.declared), numbers(row.held), row.placement)
            for rank, row in rows.items()
        ]
        alike.setdefault(repr(cells[fqn]), []).append(fqn)
    if not alike:
        return ()
    table = Table(
        title="Experts of each rank at the save and after loading, by their bytes",
        columns=("parameter", "rank", "at the save", "after loading", "placement"),
        rows=tuple((listed(names), *row) for names in alike.values() for row in cells[names[0]]),
    )
    return (table,)
