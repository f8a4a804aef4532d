"""Turns a run's result into entries: whether each variant is good, bad or unknown on a track.

On the pinned stacks the scenario's expectation is good. On a moved release every failure is bad,
also the scenario's own: the question is whether it still exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from moediag.lab.campaign.nightly.night import Entry, State
from moediag.lab.campaign.nightly.tracks import Track
from moediag.result import Role, RunResult, TrialResult, Verdict

_NOTHING = (Verdict.INCONCLUSIVE, Verdict.NOT_APPLICABLE)


def entries(result: RunResult, track: Track, evidence: str) -> tuple[Entry, ...]:
    """Returns one entry per expectation, in order. ``evidence``: the run directory, relative."""
    judged = [t for t in result.trials if t.expected]
    variants = list(dict.fromkeys(t.variant for t in judged))
    found = [
        _entry(result, [t for t in judged if t.variant == v], track, evidence) for v in variants
    ]
    return tuple(_beside_controls(found))


def _entry(result: RunResult, repeats: Sequence[TrialResult], track: Track, evidence: str) -> Entry:
    """Returns the entry of a failing repeat; else of a repeat with a result."""
    states = [_state(t, bool(track.package)) for t in repeats]
    wanted = next((s for s in (State.BAD, State.GOOD) if s in states), State.UNKNOWN)
    shown = repeats[states.index(wanted)]
    return Entry(
        scenario=result.scenario,
        variant=shown.variant,
        role=shown.role,
        track=track.name,
        state=wanted,
        verdict=shown.verdict,
        expected=shown.expected,
        signature=shown.signature,
        why=shown.cause,
        stack={name: version for name, version in shown.stack.items() if version},
        evidence=evidence,
        seconds=round(sum(trial.seconds.total or 0.0 for trial in repeats), 3),
    )


def _state(trial: TrialResult, moved: bool) -> State:
    if trial.verdict in _NOTHING:
        return State.UNKNOWN
    if not moved:
        return State.GOOD if trial.met else State.BAD
    return State.GOOD if trial.verdict in _allowed(trial) else State.BAD


def _allowed(trial: TrialResult) -> set[str]:
    """Returns allowed outcomes: a fix known to be wrong, and a control that fails by design, may
    fail."""
    expected = set(trial.expected.split(" or "))
    if trial.role == Role.UNFIXED or Verdict.CLEAN in expected:
        return {Verdict.CLEAN}
    return {Verdict.CLEAN, *expected}


def _beside_controls(found: Sequence[Entry]) -> Iterator[Entry]:
    """Yields the entries; if a control fails, all others are unknown."""
    failed = [e.variant for e in found if e.role == Role.CONTROL and e.state == State.BAD]
    for entry in found:
        if failed and entry.role != Role.CONTROL:
            why = f"{entry.verdict}, but the control {failed[0]} fails as well"
            yield dataclasses.replace(entry, state=State.UNKNOWN, why=why)
        else:
            yield entry
