"""Sentences about mistakes in the training loop of a watched job."""

from __future__ import annotations

from collections.abc import Iterator

from moediag.diagnosis.numbers.law_loops import Kept, LeftInEvaluation, LoopFacts, Untrained
from moediag.evidence.law_model import ClipNorm
from moediag.result.wording import listed, plural


def of_kept(k: Kept) -> str:
    at = f" at {k.line}" if k.line else ""
    steps = ", ".join(map(str, k.steps[:6]))
    return (
        f"After the checked steps ({steps}) nothing cleared the gradients of {listed(k.names)} "
        f"before {k.optimizer}.step(){at} was called again: each update also used the gradients "
        "of all updates before it."
    )


def of_left(e: LeftInEvaluation) -> str:
    return (
        f"{e.name} was trained in training mode at first and only in evaluation mode since step "
        f"{e.since}, so its {_modules(e)} did not do what they do in training."
    )


def of_scaled(c: ClipNorm) -> str:
    at = f" at {c.line}" if c.line else ""
    return (
        f"In step {c.step} clip_grad_norm_{at} clipped to a norm of {c.max_norm:g} gradients that "
        f"were still multiplied by the loss scale {c.scale:g} (their norm was {c.norm:.6g}): after "
        f"the scaler's division they are {c.scale:g} times smaller than intended."
    )


def of_untrained(u: Untrained) -> str:
    return (
        f"In all {u.steps} checked steps the parameters of every optimizer had no gradients, while "
        f"{plural(len(u.names), 'parameter')} of the model ({listed(u.names)}) had some and never "
        "changed: the optimizer was made from other parameters than those of the model that runs."
    )


def of_absent(u: Untrained) -> str:
    return (
        f"In all {u.steps} checked steps no parameter of any optimizer had a gradient when the "
        "optimizer stepped: the updates train nothing."
    )


def notes(loops: LoopFacts) -> Iterator[str]:
    """Facts that may be deliberate."""
    left = loops.left
    if left is not None and not left.since:
        yield (
            f"{left.name} was trained in evaluation mode in all checked steps: its "
            f"{_modules(left)} did not do what they do in training."
        )


def _modules(e: LeftInEvaluation) -> str:
    return f"modules of class {' and '.join(e.kinds[:3])}"
