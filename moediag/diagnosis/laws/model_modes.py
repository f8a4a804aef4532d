"""A model that is trained is in training mode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.evidence.law_model import Mode, ModeChange
from moediag.result import Verdict

_STEPS = 3  # in evaluation mode
_MOST_CHANGES = 100  # that are recorded

# A model's name, the classes of its modules that depend on the mode, and the first step of those in
# evaluation mode only; 0 if it never was trained in training mode.
_Left = tuple[str, tuple[str, ...], int]


@law(Verdict.WRONG_GRADIENTS)
def left_in_evaluation(facts: Facts) -> Findings:
    """A watched job went on training a model in evaluation mode."""
    of: dict[int, list[_Left | None]] = defaultdict(list)
    for own in facts.of(recorded).values():
        for model in sorted({mode.model for mode in own.modes}):
            modes = [mode for mode in own.modes if mode.model == model]
            changes = [change for change in own.mode_changes if change.model == model]
            of[model].append(_left(modes, changes))
    # The same on all ranks that train the model, until the last checked step.
    every = (found[0] for found in of.values() if len(set(found)) == 1)
    first = next((found for found in every if found is not None), None)
    if first is None:
        return
    name, kinds, since = first
    modules = f"modules of class {' and '.join(kinds[:3])} did not do what they do in training."
    if not since:
        yield f"{name} was trained in evaluation mode in all checked steps: its {modules}"
        return
    if all("Norm" in kind for kind in kinds):  # detection recipes freeze batch norm like this
        yield Suspicious(
            f"{name} was trained in evaluation mode since step {since}: its {modules} Nothing else "
            "in it depends on the mode."
        )
        return
    yield Broken(
        f"{name} was trained in training mode at first and only in evaluation mode since step "
        f"{since}, so its {modules}",
        pattern="mode",
        next_step="Call `model.train()` after each evaluation.",
    )


def _left(modes: Sequence[Mode], changes: Sequence[ModeChange]) -> _Left | None:
    last = modes[-1]
    trained = any(mode.training for mode in modes)
    if last.training or not last.kinds or not changes or len(changes) >= _MOST_CHANGES:
        return None
    since = changes[-1]
    if since.training or last.step - since.step < _STEPS:
        return None
    if not trained and len(changes) > 1:
        return None
    return last.name, last.kinds, since.step if trained else 0
