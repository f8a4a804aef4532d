"""A loss gets what it takes: scores, shapes that agree, and the targets that are meant."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.evidence.model import Evidence
from moediag.result.wording import at_line, few

_ENOUGH = 3  # checked steps
_TAKES = {
    "cross_entropy_loss": "cross_entropy{at} gets probabilities, and computes softmax of them once "
    "more: its gradients are small, and it cannot come near 0. Give it the scores before softmax.",
    "nll_loss_nd": "nll_loss{at} gets scores or probabilities, and takes their logarithms: it only "
    "adds up what it gets. Give it the result of log_softmax, or use cross_entropy.",
    "kl_div": "kl_div{at} gets values above 0, and takes logarithms of probabilities: it is no "
    "divergence of what it gets. Give it the result of log_softmax.",
    "binary_cross_entropy_with_logits": "binary_cross_entropy_with_logits{at} gets the result of "
    "sigmoid, and computes sigmoid of it once more. Give it the scores before sigmoid.",
}


def _calls(evidence: Evidence) -> dict[tuple[str, str], list[tuple[Any, ...]]]:
    """What all ranks recorded of a loss, by function and line, if in enough steps: the step,
    whether its input is unfit and spread, and of tokens how far ahead, how many and the padding."""
    found: dict[tuple[str, str], list[tuple[Any, ...]]] = defaultdict(list)
    for own in recorded(evidence).values():
        for name, line, *call in own.rows(
            "loss_inputs", name=str, line=str, step=int, unfit=bool, spread=bool, ahead=int,
            counted=int, padding=int,
        ):  # fmt: skip
            found[name, line].append(tuple(call))
    return {of: calls for of, calls in found.items() if len({one[0] for one in calls}) >= _ENOUGH}


@law(suspects=True)
def losses_misused(facts: Facts) -> Findings:
    """A loss gets probabilities where it takes scores, scores where it takes logarithms, or an
    input and a target of which each is repeated along a dimension of the other."""
    for (name, line), calls in facts.of(_calls).items():
        at = at_line(line)
        _, unfit, spread, *_ = zip(*calls, strict=True)
        if name in _TAKES and all(unfit):
            yield Suspicious(f"In all checked steps {_TAKES[name].format(at=at)}")
        if all(spread):
            yield Suspicious(
                f"In all checked steps {name}{at} gets an input and a target of different shapes, "
                "each of which is repeated along a dimension of the other, such as (N, 1) and "
                "(N,): each prediction is compared with the targets of all samples. Give both the "
                "same shape."
            )


@law(suspects=True)
def targets_misplaced(facts: Facts) -> Findings:
    """Targets are the tokens after the next ones, or a loss counts targets that are padding."""
    every = [call for calls in facts.of(_calls).values() for call in calls]
    next_ones = any(ahead == 1 for _, _, _, ahead, *_ in every)
    for (_, line), calls in facts.of(_calls).items():
        padded = [(step, part, of) for step, *_, of, part in calls if 0 < part <= of]
        if len({step for step, *_ in padded}) >= _ENOUGH:
            share = sum(part for _, part, _ in padded) / sum(of for *_, of in padded)
            yield Suspicious(
                f"In steps {few(sorted({step for step, *_ in padded}))} the loss{at_line(line)} "
                f"counts targets that are padding after padding, {100 * share:.0f} % of its "
                "targets: the model learns to continue padding, and the mean over tokens is "
                "smaller. Set these targets to ignore_index (-100)."
            )
        places = {ahead for _, _, _, ahead, *_ in calls}
        if places == {2} and not next_ones:  # heads for later tokens have one for the next
            yield Suspicious(
                f"In all checked steps the targets of the loss{at_line(line)} are the tokens after "
                "the next ones: they are shifted twice, as where the program shifts labels and the "
                "model shifts them again. Shift them once."
            )
        if places == {0}:
            yield (
                f"In all checked steps the targets of the loss{at_line(line)} are the very tokens "
                "that the model gets at their places: a model that predicts the next token needs "
                "targets that are shifted by one."
            )
