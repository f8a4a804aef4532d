"""Parameters of an optimizer change in its updates, and keep the changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.large_calls import elements
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.diagnosis.laws.optimizer_checks import ENOUGH, Checks, long, optimizers, rate
from moediag.evidence.law_model import NO_GRADIENT, ZERO_GRADIENT, LawCheck, plain_names, trains
from moediag.evidence.model import Evidence
from moediag.protocol.names import plain_name
from moediag.result import Verdict
from moediag.result.wording import counted, listed, plural


@law(Verdict.WRONG_WEIGHTS)
def updates_undone(facts: Facts) -> Findings:
    """An optimizer of a watched job updates a parameter, and the program writes the old value
    back."""
    names = _undone(facts)
    text = (
        f"The optimizer changed {counted(names)} in its updates, and before each next update "
        f"{'they' if len(names) > 1 else 'it'} had the first value again: after the update "
        "something writes old values into the model"
    )
    # A scale may be pressed against a bound, and a mask may prune a whole layer.
    if names and facts.of(_free).isdisjoint(names):
        yield Suspicious(f"{text}, or bounds or masks it.", names)
    elif names:
        yield Broken(
            f"{text}.",
            pattern="undone",
            next_step="Look for what writes parameters after the update: a copy from weights that "
            "are kept elsewhere and were not updated, or a broadcast or load of old values.",
            names=names,
        )


def _free(evidence: Evidence) -> frozenset[str]:
    """Matrices with elements other than zero."""
    return frozenset(
        piece.name
        for own in recorded(evidence).values()
        for check in own.checks
        for piece, value in zip(check.pieces, check.params, strict=False)
        if "x" in piece.shape and value != f"{elements(piece.shape):x}"
    )


def _undone(facts: Facts) -> tuple[str, ...]:
    """Parameters that changed in updates and never between checks, of an optimizer whose other
    parameters do."""
    found: dict[str, None] = {}
    for of in long(facts):
        updates: dict[int, set[str]] = defaultdict(set)
        for rank in of:
            for step, changed in facts.of(recorded)[rank].rows(
                "updated", step=int, names=plain_names
            ):
                updates[step] |= {*changed}
        still = _still(of)
        if set(still) < {piece.name for checks in of.values() for piece in checks[0].pieces}:
            often = [n for n in still if sum(n in of for of in updates.values()) >= ENOUGH - 1]
            found |= dict.fromkeys(often)
    return tuple(found)


@law(suspects=True)
def weights_returned(facts: Facts) -> Findings:
    """Parameters had again the values of a much earlier update, so what was trained in between is
    lost."""
    returns = dict.fromkeys(
        one
        for own in facts.of(recorded).values()
        for one in own.rows("returned", step=int, name=plain_name, since=int)
    )
    # Several tasks that begin from the same weights return to other ones later.
    if returns and len({since for _, _, since in returns}) == 1:
        step, _, since = next(iter(returns))
        names = tuple(dict.fromkeys(name for _, name, _ in returns))
        steps = dict.fromkeys(step for step, _, _ in returns)
        more = f" (and in {plural(len(steps) - 1, 'later step')})" if len(steps) > 1 else ""
        yield Suspicious(
            f"Before the update of step {step}{more} {listed(names)} had exactly the values of "
            f"step {since} again: something writes weights of an earlier time into the model, such "
            "as a backup that is not renewed, and what was trained in between is lost.",
            names,
        )


@law(suspects=True)
def parameters_still(facts: Facts) -> Findings:
    """Parameters never changed although they had gradients and a learning rate."""
    undone = _undone(facts)
    still = dict.fromkeys(name for of in long(facts) for name in _still(of))
    # The gradient of a bias before a normalisation is a rounding error, whatever the dtype.
    with_weight = {f"{name.removesuffix('.weight')}.bias" for name in still}
    names = tuple(
        name
        for name in still
        if name not in undone and (name in with_weight or not name.endswith(".bias"))
    )
    if names:
        yield Suspicious(
            f"{counted(names)} did not change between the checked steps, though gradients and "
            "learning rate were not zero: updates may round to nothing in the parameters' dtype.",
            names,
        )


def _still(of: Checks) -> list[str]:
    """Parameters that kept their bytes over all checked steps, on every rank that holds them."""
    moved: set[str] = set()
    held: dict[str, bool] = {}
    for checks in of.values():
        for at, piece in enumerate(checks[0].pieces):
            rows = [
                (check.params[at], check.grads[at], rate(check, check.pieces[at].group))
                for check in checks
            ]
            if any(grad is None for _, grad, _ in rows):
                continue
            trained = all(
                grad not in (NO_GRADIENT, ZERO_GRADIENT) and rate for _, grad, rate in rows[:-1]
            )
            held.setdefault(piece.name, True)
            if not trained or len({param for param, _, _ in rows}) != 1 or rows[0][0] is None:
                moved.add(piece.name)
    return [name for name in held if name not in moved]


@law(Verdict.WRONG_WEIGHTS)
def copies_apart(facts: Facts) -> Findings:
    """An optimizer of a watched job updates its copy of a parameter, and the model keeps the first
    value; or the first update writes such copies over the weights of the model."""
    yield from _overwritten(facts)
    found: dict[str, None] = {}
    for own in facts.of(recorded).values():
        of_model: dict[str, list[LawCheck]] = defaultdict(list)
        for check in own.checks:
            if check.copies:
                of_model[check.key].append(check)
        for checks in of_model.values():
            found |= dict.fromkeys(_not_copied(checks))
    if found:
        names = tuple(found)
        yield Broken(
            f"The optimizer updated its copies of {counted(names)}, and the model kept the first "
            f"{'values' if len(names) > 1 else 'value'} in all checked steps, though it computes "
            "gradients with them: the updates were never copied into the model.",
            pattern="copies",
            next_step="Copy each updated parameter of the optimizer into the model.",
            lasting=True,
            names=names,
        )


def _overwritten(facts: Facts) -> Findings:
    """Whether parameters differed from DeepSpeed's copies of them before the first update only."""
    rows = [own.rows("copied", step=int, apart=plain_names) for own in facts.of(recorded).values()]
    every = [check for of in facts.of(optimizers) for checks in of.values() for check in checks]
    first = {check.step for check in every if not check.count}
    known = all(len(own) >= ENOUGH and own[0][0] in first for own in rows)
    names = tuple(dict.fromkeys(name for own in rows for _, of in own[:1] for name in of))
    if names and known and not any(of for own in rows for _, of in own[1:]):
        yield Broken(
            f"Before the first update {plural(len(names), 'parameter')} ({listed(names)}) had "
            "other values than DeepSpeed's copies in float32, and in later steps the same ones: "
            "the update wrote the copies over what was loaded after the engine was made.",
            pattern="overwritten",
            next_step="Load the weights before `deepspeed.initialize`, or call "
            "`engine.optimizer.refresh_fp32_params()` after loading.",
            lasting=True,
            names=names,
        )


def _not_copied(checks: Sequence[LawCheck]) -> list[str]:
    """Parameters that never changed and had gradients, while their copies did; nothing if all of
    the model is so: it may be another model than the one that trains."""
    trained = [
        (piece.name, {check.params[at] for check in checks}, [c.copies.get(at) for c in checks])
        for at, piece in enumerate(checks[0].pieces)
        if trains(check.grads[at] for check in checks)
    ]
    still = [
        name
        for name, params, copies in trained
        if len(params) == 1 and params == {copies[0]} and len(set(copies)) == len(copies) >= ENOUGH
    ]
    return still if any(len(params) > 1 for _, params, _ in trained) else []
