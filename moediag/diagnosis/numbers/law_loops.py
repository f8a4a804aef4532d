"""Mistakes of a training loop that are the same on all ranks: gradients that are never cleared, a
model left in evaluation mode, scaled gradients that are clipped, an optimizer of other parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import isfinite

from moediag.evidence.law_model import Cleared, ClipNorm, Mode, ModeChange, RankLaws
from moediag.evidence.model import Evidence
from moediag.records import dataclass

_ENOUGH = 2  # records on each rank
_STEPS = 3  # checked steps, or steps in evaluation mode
_MOST_CHANGES = 100  # that are recorded


@dataclass(frozen=True, slots=True)
class Kept:
    """Gradients that were never cleared between two updates of an optimizer."""

    optimizer: str
    names: tuple[str, ...]
    steps: tuple[int, ...]
    line: str


@dataclass(frozen=True, slots=True)
class LeftInEvaluation:
    """A model that was trained in training mode and then in evaluation mode only."""

    name: str
    kinds: tuple[str, ...]
    since: int
    """The first step in evaluation mode; 0 if it never was trained in training mode."""


@dataclass(frozen=True, slots=True)
class Untrained:
    """No parameter of any optimizer had a gradient."""

    names: tuple[str, ...]
    """Parameters that no optimizer has, had gradients and never changed; empty if none had any."""
    steps: int
    """How many steps were checked."""


@dataclass(frozen=True, slots=True)
class LoopFacts:
    kept: Kept | None = None
    left: LeftInEvaluation | None = None
    scaled: ClipNorm | None = None
    """The first call that clipped gradients which were still multiplied by the loss scale."""
    untrained: Untrained | None = None


def loop_facts(evidence: Evidence) -> LoopFacts:
    laws = [seen.laws for _, seen in sorted(evidence.ranks.items()) if seen.laws is not None]
    return LoopFacts(_kept(laws), _left(laws), _scaled(laws), _untrained(laws))


def _kept(laws: Sequence[RankLaws]) -> Kept | None:
    """An optimizer is recognised by its class and the parameters that were followed."""
    of: dict[tuple[str, tuple[str, ...]], list[Cleared]] = defaultdict(list)
    for own in laws:
        for one in own.cleared:
            of[one.optimizer, one.names].append(one)
    for (optimizer, names), records in of.items():
        steps = sorted({one.step for one in records})
        if len(steps) >= _ENOUGH and all(one.kept for one in records):
            return Kept(optimizer, names, tuple(steps), records[0].line)
    return None


def _left(laws: Sequence[RankLaws]) -> LeftInEvaluation | None:
    """The same on all ranks that train the model, until the last checked step."""
    of: dict[int, list[LeftInEvaluation | None]] = defaultdict(list)
    for own in laws:
        for model in sorted({mode.model for mode in own.modes}):
            modes = [mode for mode in own.modes if mode.model == model]
            changes = [change for change in own.mode_changes if change.model == model]
            of[model].append(_of_model(modes, changes))
    for found in of.values():
        if found[0] is not None and len(set(found)) == 1:
            return found[0]
    return None


def _of_model(modes: Sequence[Mode], changes: Sequence[ModeChange]) -> LeftInEvaluation | None:
    last = modes[-1]
    trained = any(mode.training for mode in modes)
    if last.training or not last.kinds or not changes or len(changes) >= _MOST_CHANGES:
        return None
    since = changes[-1]
    if since.training or last.step - since.step < _STEPS:
        return None
    if not trained and len(changes) > 1:
        return None
    return LeftInEvaluation(last.name, last.kinds, since.step if trained else 0)


def _scaled(laws: Sequence[RankLaws]) -> ClipNorm | None:
    """A bound as large as the scale was multiplied by it, too."""
    calls = [n for own in laws for n in own.norms if isfinite(n.norm) and n.factor < 1]
    wrong = [norm for norm in calls if norm.scale > max(1.0, norm.max_norm)]
    steps = {norm.step for norm in wrong}
    return min(wrong, key=lambda norm: norm.step) if len(steps) >= _ENOUGH else None


def _untrained(laws: Sequence[RankLaws]) -> Untrained | None:
    found: Untrained | None = None
    for own in laws:
        states = own.models
        if len(states) < _STEPS or not all(state.idle for state in states):
            return None
        first = states[0].left_out
        if None in first.values() or any(state.left_out != first for state in states):
            return None
        found = found or Untrained(tuple(first), len(states))
    return found
