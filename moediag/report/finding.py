"""One trial in full: title, blame, both sides of the divergence, cause, stacks.

Pure: turns a result into words; each view does its own layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from moediag.records import dataclass
from moediag.report import again
from moediag.report.excerpt import ExcerptFile, excerpt_of
from moediag.report.similar_stacks import Family, families
from moediag.report.tables import of_repeats
from moediag.result import (
    FAILURES,
    Diagnosis,
    FirstDivergence,
    Place,
    Role,
    RunResult,
    Table,
    TrialResult,
    Verdict,
    wording,
)


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks that issued the same operation at the first divergence."""

    ranks: str
    op: str
    elements: str
    dtype: str
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks that waited in the same frames, innermost first."""

    ranks: str
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """One trial, or several equal repeats, as a page shows it."""

    title: tuple[str, ...]
    found: Diagnosis
    remark: str
    """How the verdict compares with the expectation."""
    blame: tuple[str, ...]
    """Culprits, victims and confidence, each as one part of a line."""
    world_size: int
    places: tuple[str, ...]
    """Where ranks are in the user's code, one text for each place."""
    timing: str
    divergence: str
    sides: tuple[Side, ...]
    gradients: str
    wrong_parameters: tuple[str, ...]
    stacks: tuple[StackGroup, ...]
    evidence: str
    tables: tuple[Table, ...]
    families: tuple[Family, ...]
    """The stacks by similarity."""
    excerpt: tuple[ExcerptFile, ...] = ()
    """The lines of the program that say why ranks are where they are."""
    again: str = ""
    """The command that shows it again, of a trial of a scenario."""


def unfixed_clean(trials: Sequence[TrialResult]) -> bool:
    """Whether the unfixed code ran and never failed."""
    unfixed = [t.verdict for t in trials if t.role == Role.UNFIXED]
    return bool(unfixed) and all(verdict == Verdict.CLEAN for verdict in unfixed)


def broken(t: TrialResult) -> bool:
    """Whether the trial contradicts its expectation; a trial that was not applicable does not."""
    return not t.met and t.verdict != Verdict.NOT_APPLICABLE


def finding_of(group: Sequence[TrialResult], result: RunResult) -> Finding:
    """The finding of ``group``: repeats of one trial with the same outcome, at least one."""
    t = group[0]
    same_trial = [o for o in result.trials if o.variant == t.variant and o.stack == t.stack]
    title = [
        result.scenario,
        t.variant,
        *wording.stack(t.stack),
        wording.backend(t.backend, t.shared_gpu, t.stack.get("nccl")),
    ]
    if t.world_size:  # else not known
        title.append(wording.plural(t.world_size, "rank"))
    if len(same_trial) > 1:
        title.append(f"{len(group)} of {len(same_trial)} repeats")
    return Finding(
        title=tuple(piece for piece in title if piece),
        found=t.diagnosis,
        remark=_remark(t, result),
        blame=_blame(t),
        world_size=t.world_size,
        places=_places(t.diagnosis.places),
        excerpt=excerpt_of(t.diagnosis.paths),
        timing=_timing(t),
        divergence=_where(t.diagnosis.first_divergence),
        sides=_sides(t.diagnosis.first_divergence),
        gradients=_gradients(t),
        wrong_parameters=tuple(wording.compact(t.wrong_parameters)),
        stacks=_stacks(t),
        evidence=t.evidence,
        tables=of_repeats(group),
        families=families(t.diagnosis.stacks),
        again=again.command(result, t) if t.expected else "",
    )


def _remark(t: TrialResult, result: RunResult) -> str:
    """Returns how the verdict differs from the expectation; empty if it does not."""
    if not t.expected:
        return ""
    if t.met:
        if t.role == Role.FIX and t.verdict in FAILURES:
            return "this fix fails where the unfixed code is clean: it introduces the failure"
        return ""
    if t.verdict == Verdict.NOT_APPLICABLE:
        return f"not applicable on this stack: expected {t.expected}, nothing was shown"
    if t.verdict in t.expected.split(" or "):
        return "the verdict is the expected one, but not with the expected ranks or signature"
    if t.role == Role.CONTROL:
        return f"a control failed (expected {t.expected}): the comparison proves nothing"
    if t.verdict == Verdict.CLEAN:
        return f"not reproduced: expected {t.expected}, but {_clean_numbers(t)}"
    if t.verdict in FAILURES and FAILURES.intersection(t.expected.split(" or ")):
        return f"a different failure than the expected {t.expected}, so it does not count"
    if t.role == Role.FIX and t.verdict in FAILURES and unfixed_clean(result.trials):
        return f"expected {t.expected}; this fix fails where the unfixed code is clean"
    return f"expected {t.expected}" if t.expected else ""


def _clean_numbers(t: TrialResult) -> str:
    if not t.parameters_compared:
        return f"{wording.plural(t.world_size, 'rank')} ran to the end"
    return (
        f"{wording.plural(t.world_size, 'rank')} ran to the end with "
        f"{wording.plural(t.parameters_compared, 'gradient')} equal to the reference "
        f"(largest error {wording.error_size(t.gradient_error)})"
    )


def _blame(t: TrialResult) -> tuple[str, ...]:
    pieces = []
    if t.verdict in FAILURES:
        if t.culprits:
            label = "CULPRIT" if len(t.culprits) == 1 else "CULPRITS"
            pieces.append(f"{label}  {wording.ranks(t.culprits)}")
        else:
            ranks_differ = t.verdict in (Verdict.HANG, Verdict.COLLECTIVE_MISMATCH, Verdict.CRASH)
            pieces.append("not known which rank" if ranks_differ else "no rank is named")
        if t.victims:
            label = "VICTIM" if len(t.victims) == 1 else "VICTIMS"
            pieces.append(f"{label}  {wording.ranks(t.victims)}")
    return (*pieces, f"confidence {t.confidence}")


def _timing(t: TrialResult) -> str:
    timing = []
    if t.seconds.launch is not None:
        timing.append(f"launched in {wording.seconds(t.seconds.launch)}")
    if t.seconds.stall_to_verdict is not None:
        timing.append(f"diagnosed {wording.seconds(t.seconds.stall_to_verdict)} after it stopped")
    if t.seconds.total is not None and not timing:
        timing.append(f"took {wording.seconds(t.seconds.total)}")
    return ", ".join(timing)


def _places(places: Sequence[Place]) -> tuple[str, ...]:
    """``rank 1: train.py:96 save, waits in barrier, under `if rank == 0` at train.py:94``."""
    return tuple(
        f"{wording.ranks(p.ranks)}: "
        + ", ".join(filter(None, (p.line, _outermost(p), p.what, *p.conditions[:1])))
        for p in places
    )


def _outermost(place: Place) -> str:
    """``from train.py:96``, if the line is in another file: a model's line says less."""
    line = place.callers[-1].partition(" ")[0] if place.callers else ""
    same = line.partition(":")[0] == place.line.partition(":")[0]
    return "" if same or not (line and place.line) else f"from {line}"


def _where(divergence: FirstDivergence | None) -> str:
    if divergence is None:
        return ""
    phase = f", {divergence.phase}" if divergence.phase and divergence.phase != "other" else ""
    module = f" of {divergence.module}" if divergence.module else ""
    return f"operation {divergence.index} on {divergence.axis}{phase}{module}"


def _sides(divergence: FirstDivergence | None) -> tuple[Side, ...]:
    if divergence is None:
        return ()
    same: dict[tuple[str, str, str, tuple[str, ...]], list[int]] = {}
    for rank, side in divergence.ranks.items():
        key = (side.op, wording.plural(side.numel, "element"), side.dtype, side.parameters_missing)
        same.setdefault(key, []).append(int(rank))
    return tuple(
        Side(wording.ranks(members), op, elements, dtype, tuple(wording.compact(missing)))
        for (op, elements, dtype, missing), members in sorted(
            same.items(), key=lambda item: min(item[1])
        )
    )


def _gradients(t: TrialResult) -> str:
    if not t.wrong_parameters:
        return ""
    text = (
        f"{len(t.wrong_parameters)} of {wording.plural(t.parameters_compared, 'parameter')} wrong"
    )
    text += " against the single-process reference"
    if t.gradient_error is not None:
        text += f"; largest error {wording.error_size(t.gradient_error)}"
        text += f" in {t.diagnosis.worst_parameter}" if t.diagnosis.worst_parameter else ""
    return text


def _stacks(t: TrialResult) -> tuple[StackGroup, ...]:
    same: dict[tuple[str, ...], list[int]] = {}
    for rank, frames in t.diagnosis.stacks.items():
        same.setdefault(frames, []).append(rank)
    return tuple(
        StackGroup(wording.ranks(members), frames)
        for frames, members in sorted(same.items(), key=lambda item: min(item[1]))
    )
