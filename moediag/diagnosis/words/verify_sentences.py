"""Sentences about a job that does not train the same parameters as one process."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from moediag.diagnosis.numbers.gradients import GradientFacts
from moediag.evidence.model import Evidence
from moediag.result import Place
from moediag.result.wording import listed, plural, ranks

if TYPE_CHECKING:
    from moediag.protocol.outcome import WrongModule

_SAME = 0.01  # relative difference of factors that rounding explains
_MOST = 4  # factors of a rank
_NAMED = 8  # names in a sentence


def of_otherwise(evidence: Evidence) -> str:
    """Which parameters are frozen or in no optimizer on one side only; "" where none is."""
    sentences = _sentences()
    found: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for how in sentences:
        on: dict[str, list[int]] = defaultdict(list)
        for rank, seen in sorted(evidence.ranks.items()):
            told = seen.outcome.trained_otherwise if seen.outcome is not None else {}
            for name in told.get(how, ()):
                on[name].append(rank)
        for name, where in on.items():
            found[how, tuple(where)].append(name)
    return " ".join(
        sentences[how].format(
            who=_names(names), do="do" if len(names) > 1 else "does", where=ranks(where)
        )
        for (how, where), names in found.items()
    )


def _names(names: list[str]) -> str:
    return listed(names) if len(names) <= _NAMED else plural(len(names), "parameter")


def _sentences() -> dict[str, str]:
    from moediag.protocol import outcome

    return {
        outcome.FROZEN: "{who} {do} not require a gradient (requires_grad is False) on "
        "{where}, and {do} in one process.",
        outcome.THAWED: "{who} {do} not require a gradient in one process (requires_grad is "
        "False), and {do} on {where}.",
        outcome.LEFT_OUT: "No optimizer that stepped has {who}, on {where}; in one process one "
        "has.",
        outcome.ABSENT: "No rank holds {who}, which one process trains.",
        outcome.NOT_SENT: "The optimizer of another rank updates {who}, and its new values do not "
        "reach {where} before the next step: they are not sent there.",
        outcome.BARE: "The program calls {who}, the module inside DistributedDataParallel, instead "
        "of the wrapper: gradients are not averaged.",
        outcome.NO_SYNC: "DistributedDataParallel({who}) is called only under no_sync(), in every "
        "micro-batch: gradients are not averaged.",
        outcome.REPLACED: "{who} took the place of a parameter after DistributedDataParallel was "
        "made, which does not know it.",
        outcome.NOT_AVERAGED: "The mean over ranks of the gradient of {who} is right, but each "
        "rank has its own: it was not averaged before it was clipped or used.",
        outcome.SHIFTED: "Each element of the gradient of {who} is that of an element near it: a "
        "flat gradient is filled or read a few elements late or early.",
        outcome.NOT_SUMMED: "The sum over ranks of the gradient of {who} is right, but each rank "
        "has its own part: it was not summed.",
    }


def of_first_wrong(evidence: Evidence, gradients: GradientFacts) -> tuple[str, Place | None]:
    """Which module is the first that computes something wrong, and the line that called it; ""
    where nothing is known."""
    from moediag.protocol import outcome

    wrong = {rank: one for rank, one in _modules(evidence).items() if one.what != outcome.AFTER}
    if not wrong:
        return _after(evidence, gradients)[0], None
    forward = [one for one in wrong.values() if one.what in (outcome.OUTPUT, outcome.INPUT)]
    first = min(forward or wrong.values(), key=lambda one: one.order)
    where = tuple(r for r, one in wrong.items() if (one.name, one.what) == (first.name, first.what))
    name = f"{first.name} ({first.kind})" if first.name else f"the model ({first.kind})"
    name += f", called at {first.at}," if first.at else ""
    side = "output" if first.of_output else "input"
    begin = "In the forward all outputs of modules are right. "
    text = {
        outcome.OUTPUT: f"The first wrong output is that of {name} on {ranks(where)}: its input "
        f"{'is right' if first.input_known else 'could not be compared'}.",
        outcome.INPUT: f"The first wrong value is the input of {name} on {ranks(where)}: all "
        f"outputs of modules before it are right{_moved(first)}.",
        outcome.LOSS: f"{begin}The gradient of the output of {name} is wrong on {ranks(where)}: "
        "the loss differs.",
        outcome.GRADIENT: f"{begin}In the backward the first wrong gradient is that of the {side} "
        f"of {name} on {ranks(where)}.",
        outcome.PART: f"{begin}In the backward the gradient of the {side} of {name} is only each "
        "rank's part: the sum over ranks is right, but nothing adds it up.",
    }[first.what]
    if not first.at or first.what == outcome.LOSS:
        return text, None
    return text, Place(where, f"{first.at} {first.name}".strip(), f"first wrong {first.what}")


def _moved(first: WrongModule) -> str:
    if not first.moved:
        return ""
    return f", but those of {_names(first.moved)} are of other positions of the sequence"


def _modules(evidence: Evidence) -> dict[int, WrongModule]:
    return {
        rank: seen.outcome.first_wrong
        for rank, seen in sorted(evidence.ranks.items())
        if seen.outcome is not None and seen.outcome.first_wrong is not None
    }


def _after(evidence: Evidence, gradients: GradientFacts) -> tuple[str, str]:
    """What it means that all outputs, and up to a factor their gradients, are right, and what to
    do; "" where one is wrong or not known."""
    from moediag.protocol import outcome

    own = _modules(evidence)
    if any(one.what != outcome.AFTER for one in own.values()):
        return "", ""
    if not own or len(own) < len(evidence.ranks):
        return "", ""
    compared = plural(max(one.compared for one in own.values()), "call")
    factors = [factor for one in own.values() for factor in one.factors]
    begin = f"All {compared} of modules return what they return in one process"
    if factors and max(factors) > (1 + _SAME) * min(factors):
        by_rank = "; ".join(
            f"rank {rank}: {', '.join(f'{factor:.3g}' for factor in one.factors[:_MOST])}"
            for rank, one in own.items()
        )
        return (
            f"{begin}, but the loss weighs the samples otherwise: the gradients of activations are "
            f"these multiples of those of one process, by forward: {by_rank}. A mean over the "
            "tokens of each micro-batch or rank does that where their numbers differ.",
            "Divide the sum of the loss by the tokens of all micro-batches and ranks of a step.",
        )
    begin += ", and the gradients of activations are right up to one factor: the error is"
    rounded = {one.rounded for one in own.values()}
    if len(rounded) == 1 and "" not in rounded:
        (dtype,) = rounded
        return (
            f"{begin} where gradients of parameters are added up or reduced: all of them have only "
            f"values of {dtype}, and those of one process have more digits.",
            f"Add up and reduce the gradients in float32, not in {dtype}.",
        )
    wrong = gradients.wrong
    if len(wrong) < gradients.compared:
        return (
            f"{begin} where the gradient of {_names([*wrong])} is added up or reduced.",
            "Check what changes that gradient between its backward and the optimizer's step.",
        )
    return (
        f"{begin} in the factor of the loss, or where gradients of parameters are added up or "
        "reduced.",
        "Check the factor of the loss, and how gradients are added up and reduced.",
    )


def next_of(evidence: Evidence, gradients: GradientFacts) -> str:
    """What to do about parameters that are trained otherwise, or the first wrong module."""
    from moediag.protocol import outcome

    told = {
        how
        for seen in evidence.ranks.values()
        if seen.outcome is not None
        for how, names in seen.outcome.trained_otherwise.items()
        if names
    }
    steps = {
        outcome.BARE: "Call the DistributedDataParallel model, not the module inside it.",
        outcome.NO_SYNC: "Leave no_sync() for the last micro-batch of each step.",
        outcome.REPLACED: "Wrap the model after the last change of its parameters.",
        outcome.ABSENT: "Give these parameters to a rank.",
        outcome.NOT_SENT: "Send each parameter from the rank that updates it, after every step.",
        outcome.NOT_AVERAGED: "Average these gradients over ranks before they are clipped or used.",
        outcome.SHIFTED: "Compare where the flat gradient is filled with where it is read.",
        outcome.NOT_SUMMED: "Sum these gradients over ranks before they are clipped or used.",
    }
    found = next((text for how, text in steps.items() if how in told), "")
    _, place = of_first_wrong(evidence, gradients)
    if place is not None and not told & {outcome.BARE, outcome.NO_SYNC, outcome.ABSENT}:
        return f"Compare what {place.line} computes on a rank and in one process."
    return found or _after(evidence, gradients)[1]


def not_sent(evidence: Evidence) -> bool:
    """Whether a rank has old weights because another rank did not send its update."""
    from moediag.protocol.outcome import NOT_SENT

    outcomes = (seen.outcome for seen in evidence.ranks.values())
    return any(one is not None and one.trained_otherwise.get(NOT_SENT) for one in outcomes)
