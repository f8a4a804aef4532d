"""A model that is trained is in training mode, and in the precision that was asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.evidence.law_model import LawCheck, Mode, ModeChange
from moediag.result import Verdict
from moediag.result.wording import agreeing, at_line, few, listed, plural, ranks

_STEPS = 3  # in evaluation mode
_PARTS = 2  # checked steps in which parts are
_MOST_CHANGES = 100  # that are recorded

# A model's name, the classes of its modules that depend on the mode, and the first step of those in
# evaluation mode only; 0 if it never was trained in training mode.
_Left = tuple[str, tuple[str, ...], int]


@law(Verdict.WRONG_GRADIENTS)
def left_in_evaluation(facts: Facts) -> Findings:
    """A watched job went on training a model in evaluation mode."""
    of: dict[int, dict[int, _Left | None]] = defaultdict(dict)
    last: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for rank, own in facts.of(recorded).items():
        models = sorted({mode.model for mode in own.modes})
        # Updates after the last checked step are those of the only model.
        until = facts.evidence.ranks[rank].last_step - 1 if len(models) == 1 else 0
        for model in models:
            modes = [mode for mode in own.modes if mode.model == model]
            changes = [change for change in own.mode_changes if change.model == model]
            of[model][rank] = _left(modes, changes, until)
            last[model].add((modes[-1].step, modes[-1].name))
    # All ranks that train the model went on until the same checked step, and those in evaluation
    # mode are in it since the same step.
    every = (
        set(by_rank.values()) - {None} for model, by_rank in of.items() if len(last[model]) == 1
    )
    first = next((found.pop() for found in every if len(found) == 1), None)
    if first is None:
        yield from _parts_left(facts)
        return
    name, kinds, since = first
    modules = f"{' and '.join(kinds[:3])} modules were in evaluation mode."
    by_rank = next(found for found in of.values() if first in found.values())
    who = [rank for rank, one in by_rank.items() if one == first]
    if len(who) < len(by_rank):
        averaging = {one.over for own in facts.of(recorded).values() for one in own.inputs}
        if not since or not any(set(by_rank) <= set(over) for over in averaging):
            return
        name = f"On {ranks(who)}, and not on {ranks(set(by_rank) - set(who))}, {name}"
    if not since:
        yield f"{name} was trained in evaluation mode in all checked steps: its {modules}"
        return
    if all("Norm" in kind for kind in kinds):  # detection recipes freeze batch norm like this
        yield Suspicious(
            f"{name} was trained in evaluation mode since step {since}: its {modules} Nothing else "
            "in it depends on the mode."
        )
        return
    if all(_other_optimizers(own.checks, since) for own in facts.of(recorded).values()):
        yield Suspicious(
            f"{name} was trained in training mode at first, and by another optimizer in evaluation "
            f"mode only since step {since}: its {modules}"
        )
        return
    yield Broken(
        f"{name} was trained in training mode at first and only in evaluation mode since step "
        f"{since}, so its {modules}",
        pattern="mode",
        next_step="Call `model.train()` after each evaluation.",
    )


@law(suspects=True)
def dropout_beside_training(facts: Facts) -> Findings:
    """A model that never changes, such as a teacher or a reference, ran without gradients and with
    dropout while another one trained."""
    found: dict[tuple[str, str], set[int]] = {}
    for own in facts.of(recorded).values():
        values: dict[tuple[str, str], dict[int, tuple[str | None, ...]]] = defaultdict(dict)
        for model, module, step, weights in own.rows(
            "drops", model=str, module=str, step=int, weights=_fingerprints
        ):
            values[model, module][step] = weights
        for place, steps in values.items():
            same = len(steps) >= _STEPS and len(set(steps.values())) == 1
            weights = next(iter(steps.values()))
            if same and weights and None not in weights:
                found.setdefault(place, set()).update(steps)
    for (model, module), last in list(found.items())[:1]:
        yield Suspicious(
            f"{model}, which no optimizer trains and whose weights never change, ran without "
            f"gradients and with dropout ({module}) up to steps {few(sorted(last))}: what it gives "
            "is random, which a teacher or a reference should not be. Call `eval()` on it."
        )


def _fingerprints(values: Iterable[Any]) -> tuple[str | None, ...]:
    return tuple(None if one is None else str(one) for one in values)


@law(suspects=True)
def autocast_removed(facts: Facts) -> Findings:
    """A model runs without autocast although accelerate prepared it for mixed precision."""
    rows = [own.of("settings", _without_autocast) for own in facts.of(recorded).values()]
    since = [[*takewhile(lambda row: row[1], reversed(of))] for of in rows]
    if since and min(map(len, since)) >= _STEPS:
        yield Suspicious(
            f"accelerate prepared a model for mixed precision, and since step {since[0][-1][0]} it "
            "runs without autocast: something took away the forward that prepare() gave it, as "
            "unwrap_model(model, keep_fp32_wrapper=False) does before the training ends."
        )


@law(suspects=True)
def float16_unscaled(facts: Facts) -> Findings:
    """A model runs in autocast of float16, and no scaler multiplies its losses."""
    every = facts.of(recorded).values()
    rows = [own.of("settings", _in_float16) for own in every]
    checks = [check for own in every for check in own.checks]
    scaled = any("loss_scale" in group for check in checks for group in check.hyper)
    if checks and not scaled and min(map(len, rows)) >= _STEPS and all(map(all, rows)):
        yield Suspicious(
            "In all checked steps the model runs in autocast of float16, and the optimizer steps"
            f"{at_line(checks[0].line)} without a GradScaler: gradients below 6e-8 become 0. Scale "
            "the loss, or use bfloat16."
        )


def _in_float16(event: Mapping[str, Any]) -> bool:
    return any(what.startswith("autocast = ") and ", torch.float16" in what for what in event["of"])


def _without_autocast(event: Mapping[str, Any]) -> tuple[int, bool]:
    lost = {"autocast = off", "autocast of accelerate = removed"}
    return int(event["step"]), lost <= set(event["of"])


def _other_optimizers(checks: Sequence[LawCheck], since: int) -> bool:
    """Whether no optimizer stepped before a step and after it: another phase of training."""
    before, later = ({one.key for one in checks if (one.step >= since) == at} for at in (0, 1))
    return bool(before and later) and before.isdisjoint(later)


def _parts_left(facts: Facts) -> Findings:
    """Parts that all ranks trained in evaluation mode in all checked steps from some step on, while
    the model was in training mode."""
    every = facts.of(recorded).values()
    rows = [own.rows("settings", step=int, parts=_parts) for own in every]
    found = [_since(of) for of in rows]
    names = [n for n in (found[0] if found else ()) if all(n in of for of in found)]
    for name in names[:1]:
        since, kinds = found[0][name]
        yield Suspicious(
            f"{plural(len(names), 'part')} of the model ({listed(names)}) "
            f"{agreeing('was', names)} in evaluation mode in all checked steps since step {since}, "
            "while the model was in training mode and the optimizer trained "
            f"{'them' if len(names) > 1 else 'it'}: {name} has {' and '.join(kinds[:3])} modules.",
            tuple(names),
        )


def _parts(rows: Iterable[Any]) -> dict[str, tuple[str, ...]]:
    return {str(name): tuple(map(str, of)) for name, of in rows}


def _since(
    steps: Sequence[tuple[int, dict[str, tuple[str, ...]]]],
) -> dict[str, tuple[int, tuple[str, ...]]]:
    """The parts that were in evaluation mode in several last steps, with the first of them."""
    of: dict[int, dict[str, tuple[str, ...]]] = defaultdict(dict)
    for step, parts in steps:
        of[step].update(parts)
    found = {}
    for name, kinds in (of[max(of)] if of else {}).items():
        last = [*takewhile(lambda step: name in of[step], sorted(of, reverse=True))]  # noqa: B023
        if len(last) >= _PARTS:
            found[name] = last[-1], kinds
    return found


def _left(modes: Sequence[Mode], changes: Sequence[ModeChange], until: int) -> _Left | None:
    last = modes[-1]
    if last.training or not last.kinds or not changes or len(changes) >= _MOST_CHANGES:
        return None
    since = changes[-1]
    trained = any(mode.training and mode.step < since.step for mode in modes)
    if since.training or max(last.step, until) - since.step < _STEPS:
        return None
    if not trained and len(changes) > 1:
        return None
    return last.name, last.kinds, since.step if trained else 0
