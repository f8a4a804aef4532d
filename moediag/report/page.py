"""The page of a run: pure data, computed once, laid out by every text view.

``page_of`` decides what gets a full finding (an unfixed failure, a broken expectation, a fix that
fails where the unfixed code is clean) and what gets one row. Tables are always shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from moediag.records import dataclass
from moediag.report.finding import Finding, broken, finding_of, unfixed_clean
from moediag.result import (
    FAILURES,
    FixJudgement,
    Role,
    RunResult,
    Table,
    TrialResult,
    Verdict,
    wording,
)
from moediag.result.answer_blocks import AnswerState


@dataclass(frozen=True, slots=True)
class FixRow:
    """One fix in the table of fixes."""

    variant: str
    judgement: str
    """correct, wrong, no effect, makes it worse, not applicable or unknown."""
    verdict: str
    cost: str
    cheapest: bool
    remark: str
    """May be empty."""
    notes: tuple[str, ...]
    ratio: float | None = None
    """Its step time divided by that of the unfixed step."""
    what: str = ""
    """What the fix does."""
    source: str = ""
    """Who proposed it."""
    spread: tuple[float, float] | None = None
    """Quartiles of the ratio."""

    @property
    def described(self) -> str:
        """Returns ``run every expert in index order (NovaSky-AI/SkyRL #1370)``."""
        return f"{self.what} ({self.source})" if self.what and self.source else self.what


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """One unfixed variant and whether it reproduces the failure."""

    variant: str
    judgement: str
    """reproduced, not reproduced or not decided."""
    what: str
    """What was found, and how many times."""


@dataclass(frozen=True, slots=True)
class ControlRow:
    variant: str
    verdict: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Page:
    """All that a view shows of one run."""

    scenario: str
    started: str
    overrides: tuple[str, ...]
    findings: tuple[Finding, ...]
    tabled: tuple[Finding, ...]
    """Trials without a finding that have tables."""
    tables: tuple[Table, ...]
    """Tables of the whole run."""
    claims: tuple[ClaimRow, ...]
    fixes: tuple[FixRow, ...]
    controls: tuple[ControlRow, ...]
    conclusion: tuple[str, ...]
    not_seen: tuple[str, ...]
    state: AnswerState
    explain: str = ""
    """The word that `moediag explain` has an entry for: the verdict of the first finding."""


def page_of(result: RunResult) -> Page:
    """Returns the page of one run. Repeats with the same outcome appear once, with their number."""
    repeats = _repeats(result.trials)
    findings = tuple(finding_of(g, result) for g in repeats if _of_interest(g[0], result))
    others = [finding_of(g, result) for g in repeats if not _of_interest(g[0], result)]
    seen = {text for finding in findings for text in finding.found.not_seen}
    unseen = (text for t in result.trials for text in t.diagnosis.not_seen)
    rest = dict.fromkeys(text for text in unseen if text not in seen)
    return Page(
        scenario=result.scenario,
        started=result.started,
        overrides=result.overrides,
        findings=findings,
        tabled=tuple(other for other in others if other.tables),
        tables=result.tables,
        claims=_claim_rows(result),
        fixes=_fix_rows(result),
        controls=_control_rows(result.trials),
        conclusion=(*_conclusion(result), *([result.removed] if result.removed else [])),
        not_seen=tuple(rest) if not findings else (),
        state=state_of(result),
        explain=str((*findings, *others)[0].found.verdict) if result.trials else "",
    )


def exit_code(result: RunResult) -> int:
    """Returns 0 if every expectation is met, 1 if one is broken, 3 if inconclusive."""
    return state_of(result).exit_code


def state_of(result: RunResult) -> AnswerState:
    """Returns what the trials show together.

    A control that fails makes the whole comparison inconclusive, whatever else happened. A trial
    that could not be judged is inconclusive, never a broken expectation. A not-applicable trial
    counts only if there are no others. An interrupted run has not met what it did not try. Without
    expectations (`moediag diagnose`), a failure is what was found.
    """
    judged = [t for t in result.trials if t.met or broken(t)]
    free = [t.verdict for t in result.trials if not t.expected]
    if any(verdict in FAILURES for verdict in free):
        return AnswerState.FAILURE
    if Verdict.INCONCLUSIVE in free:
        return AnswerState.INCONCLUSIVE
    unmet = [t for t in judged if not t.met]
    if any(t.role == Role.CONTROL for t in unmet):
        return AnswerState.INCONCLUSIVE
    if any(t.verdict != Verdict.INCONCLUSIVE for t in unmet):
        return AnswerState.BROKEN
    asked = [t for t in result.trials if t.role == Role.UNFIXED] or result.trials
    nothing_shown = not any(t in judged for t in asked)
    if unmet or nothing_shown or result.incomplete:
        return AnswerState.INCONCLUSIVE
    expected = any(t.expected for t in result.trials)
    return AnswerState.AS_EXPECTED if expected else AnswerState.NO_FAILURE


def _repeats(trials: Sequence[TrialResult]) -> list[list[TrialResult]]:
    """Groups trials that differ only in their repeat number and have the same outcome."""
    groups: dict[tuple[object, ...], list[TrialResult]] = {}
    for t in trials:
        stack = tuple(sorted(t.stack.items(), key=str))
        groups.setdefault((t.variant, stack, t.verdict, t.signature, t.met), []).append(t)
    return sorted(groups.values(), key=lambda group: group[0].role != Role.UNFIXED)


def _of_interest(t: TrialResult, result: RunResult) -> bool:
    if t.verdict == Verdict.NOT_APPLICABLE and not t.met:
        return t.role == Role.UNFIXED
    if not t.met:
        return True
    if not t.expected:
        found = t.verdict in FAILURES or t.verdict == Verdict.INCONCLUSIVE
        return found or bool(t.diagnosis.suspicious)
    if t.role == Role.UNFIXED:
        return t.verdict in FAILURES
    return t.role == Role.FIX and t.verdict in FAILURES and unfixed_clean(result.trials)


def _claim_rows(result: RunResult) -> tuple[ClaimRow, ...]:
    """Returns the claims if there are several or one did not reproduce. A single claim that did
    already has its finding."""
    claims = result.conclusion.claims
    if len(claims) == 1 and claims[0].reproduced is not False:
        return ()
    words = {True: "reproduced", False: "not reproduced", None: "not decided"}
    return tuple(ClaimRow(c.variant, words[c.reproduced], c.what) for c in claims)


def _fix_rows(result: RunResult) -> tuple[FixRow, ...]:
    """Returns correct fixes first, cheapest first. The spread of the unfixed step's own second
    timing is the noise."""
    judged = {f.variant: f for f in result.conclusion.fixes}
    by_variant: dict[str, list[TrialResult]] = {}
    for t in result.trials:
        if t.role == Role.FIX:
            by_variant.setdefault(t.variant, []).append(t)
    best = result.conclusion.cheapest_correct_fix
    cheapest = by_variant[best][0] if best in by_variant else None
    timed = (t.step_time_spread for t in result.trials if t.role == Role.UNFIXED)
    noise = next(filter(None, timed), (1.0, 1.0))
    rows = []
    for variant, trials in by_variant.items():
        fix = judged.get(variant)
        row = _fix_row(variant, trials, fix, result, cheapest, noise)
        cost = fix.step_time_ratio if fix and fix.step_time_ratio else float("inf")
        rows.append((row.judgement != "correct", variant != best, cost, row))
    return tuple(_said_once(row for *_, row in sorted(rows, key=lambda entry: entry[:3])))


def _said_once(rows: Iterable[FixRow]) -> Iterator[FixRow]:
    """Yields rows with notes shared by several fixes only at the first of them."""
    said: set[str] = set()
    for row in rows:
        yield replace(row, notes=tuple(note for note in row.notes if note not in said))
        said.update(row.notes)


def _fix_row(
    variant: str,
    trials: Sequence[TrialResult],
    fix: FixJudgement | None,
    result: RunResult,
    best: TrialResult | None,
    noise: tuple[float, float],
) -> FixRow:
    first = trials[0]
    verdicts = list(dict.fromkeys(t.verdict for t in trials))
    not_here = verdicts == [Verdict.NOT_APPLICABLE]
    if not_here:
        judgement = "not applicable"
    elif fix is None or Verdict.INCONCLUSIVE in verdicts:
        judgement = "unknown"
    else:
        judgement = "correct" if fix.correct else fix.effect or "wrong"
    cheapest = best is not None and variant == best.variant
    measured = fix.step_time_ratio if fix else first.step_time_ratio
    remarks = [t.cause if not_here else f"expected {t.expected}" for t in trials if not t.met][:1]
    if fix is not None and fix.why and judgement == fix.effect:
        remarks.append(fix.why)
    elif judgement == "wrong" and unfixed_clean(result.trials):
        remarks.append("fails where the unfixed code is clean")
    spread = first.step_time_spread
    if judgement == "correct" and best is not None and not cheapest:
        remarks += ["equal to the cheapest within the noise"] * _as_cheap(first, best)
    elif cheapest and spread and spread[0] <= noise[1]:
        remarks.append("no slower than unfixed within the noise")
    elsewhere = [t.stack for t in result.trials if t.role == Role.UNFIXED]
    if elsewhere and first.stack not in elsewhere:
        remarks.insert(0, ", ".join(wording.stack(first.stack)))
    return FixRow(
        variant=variant,
        judgement=judgement,
        verdict=" / ".join(verdicts),
        cost=wording.ratio(measured, spread),
        cheapest=cheapest,
        remark="; ".join(remarks),
        notes=tuple(dict.fromkeys(note for t in trials for note in t.notes)),
        ratio=measured,
        what=first.what,
        source=first.source,
        spread=spread,
    )


def _as_cheap(fix: TrialResult, best: TrialResult) -> bool:
    """Whether the middle half of the rounds shows no difference between the two fixes, each round
    compared with itself: what slows down a round slows down both."""
    pairs = zip(fix.step_time_rounds, best.step_time_rounds, strict=False)
    ratios = [mine / other for mine, other in pairs if other > 0]
    if len(ratios) < 2:
        return False
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return lower <= 1 <= upper


def _control_rows(trials: Sequence[TrialResult]) -> tuple[ControlRow, ...]:
    rows = [ControlRow(t.variant, t.verdict, broken(t)) for t in trials if t.role == Role.CONTROL]
    return tuple(dict.fromkeys(rows))


def _conclusion(result: RunResult) -> tuple[str, ...]:
    judged = [t for t in result.trials if t.met or broken(t)]
    if result.trials and not any(t.expected for t in result.trials):
        if len(result.trials) == 1 and result.trials[0].verdict == Verdict.CLEAN:
            count = len(result.trials[0].diagnosis.suspicious)
            told = (f"{count} suspicious",) if count else ()
            return (result.trials[0].cause.rstrip("."), *told)
        failures = sum(t.verdict in FAILURES for t in result.trials)
        if not failures and result.trials[-1].verdict == Verdict.INCONCLUSIVE:
            return ("inconclusive: whether there is a failure is not known",)
        trials = wording.plural(len(result.trials), "trial")
        return (f"{wording.plural(failures, 'failure')} found in {trials}",)
    met = sum(t.met for t in judged)
    lines = [f"{met} of {wording.plural(len(judged), 'expectation')} met"]
    if result.incomplete:
        lines.insert(0, f"incomplete: {result.incomplete}")
    if len(judged) < len(result.trials):
        lines.append(f"{len(result.trials) - len(judged)} not applicable here")
    failed = [t.variant for t in judged if t.role == Role.CONTROL and not t.met]
    if failed:
        lines.append("inconclusive: control " + ", ".join(dict.fromkeys(failed)) + " failed")
    elif result.conclusion.reproduced is not None:
        lines.append(_reproduced(result))
    elif any(claim.reproduced is not None for claim in result.conclusion.claims):
        lines.append(_some_reproduced(result))
    elif all(t.verdict == Verdict.CLEAN for t in result.trials) and result.trials:
        lines.append(f"clean in {wording.plural(len(result.trials), 'trial')}")
    if result.conclusion.cheapest_correct_fix and not failed:
        lines.append(f"cheapest correct fix: {result.conclusion.cheapest_correct_fix}")
    elif untimed := _untimed(result):
        fixes = "correct fix" if len(untimed) == 1 else "correct fixes"
        lines.append(f"{fixes}, not timed: {', '.join(untimed)}")
    return tuple(lines)


def _untimed(result: RunResult) -> list[str]:
    """Returns the correct fixes if no correct fix was timed."""
    other = {t.variant for t in result.trials if t.other_batch}
    correct = [f for f in result.conclusion.fixes if f.correct and f.variant not in other]
    return (
        [] if any(f.step_time_ratio is not None for f in correct) else [f.variant for f in correct]
    )


def _some_reproduced(result: RunResult) -> str:
    """Whether some claims reproduced and others did not."""
    claims = result.conclusion.claims
    shown = sum(claim.reproduced is True for claim in claims)
    text = f"{shown} of {wording.plural(len(claims), 'claim')} reproduced"
    unsure = sum(claim.reproduced is None for claim in claims)
    return text + (f", {unsure} not decided" if unsure else "")


def _reproduced(result: RunResult) -> str:
    if result.conclusion.reproduced:
        return "reproduced"
    unfixed = [t for t in result.trials if t.role == Role.UNFIXED]
    if {t.expected for t in unfixed} != {Verdict.CLEAN}:
        return "not reproduced"
    if all(t.verdict == Verdict.CLEAN for t in unfixed):
        return "unfixed is clean, as expected"
    return "unfixed fails, which was expected to be clean"
