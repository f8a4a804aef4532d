"""What is said of values that replicas must keep equal and do not: what differs, and why."""

from __future__ import annotations

from collections.abc import Sequence

from moediag.diagnosis.numbers.law_breaches import Breach
from moediag.diagnosis.numbers.law_splits import GRADIENTS, HYPER, LOSS_SCALE, STATE, Split
from moediag.evidence.law_model import PART, PLACED
from moediag.result.wording import agreeing, at_line, counted, listed, ranks


def of_breach(b: Breach) -> str:
    """What differs, since when, and what differed first."""
    if b.parameters is None:
        assert b.reason is not None
        kept = "ranks that hold parts of the same parameters"
        if b.history.how != PART:
            kept = "ranks that hold the same parameters"
        at = f" of {step_call(b)}" if b.history.line else ""
        return (
            f"In step {b.step} {hyper(b.reason)}{at} differs between {kept}: {_values(b.reason)}."
        )
    one = len(b.parameters.names) == 1
    what = f"{counted(b.parameters.names)} {agreeing('differs', b.parameters.names)}"
    who = _sides(b.parameters)
    if b.initial:
        kept = {
            PLACED: "have the placement Replicate",
        }.get(b.history.how, "are replicas, kept equal by reductions of their gradients")
        return (
            f"Before the first call of {step_call(b)}, {what}: {who}. The parameters {kept}, "
            "so they must start equal: a rank loaded or initialised other values, and nothing "
            "broadcast them afterwards."
        )
    since = f"Before {step_call(b)} of step {b.step}, {what} between replicas: {who}"
    before = f"in step {b.before} {'it was' if one else 'they were'} equal"
    return f"{since}; {before}. {reason_of(b)}"


def reason_of(b: Breach) -> str:
    if b.counts is not None:
        told = ", ".join(f"rank {r} {n} times" for r, n in sorted(b.counts.items())[:4])
        more = "" if len(b.counts) <= 4 else f" (of {len(b.counts)} ranks)"
        return f"Until then {step_call(b)} was called a different number of times: {told}{more}."
    reason = b.reason
    if reason is None:
        if b.step - (b.before or 0) == 1:
            return (
                "No difference of gradients, of the optimizer's state or of its numbers was "
                "recorded there, so the update itself or something after it wrote other values."
            )
        return "What differed first lies between these two steps and was not recorded."
    if reason.what == HYPER:
        number = hyper(reason)
        late = " at the latest" if reason.step - (b.before or 0) > 1 else ""
        since = f"differs{late} since step {reason.step}"
        return f"{number[:1].upper()}{number[1:]} {since}: {_values(reason)}."
    noun = {GRADIENTS: "gradients", STATE: "optimizer's state"}[reason.what]
    first = f"In step {reason.step} the {noun} of {listed(reason.names)} differed already"
    if reason.large:
        return (
            f"In step {reason.step} the gradients of {listed(reason.large)} differed by up to "
            f"{100 * min(reason.size, 1):.0f} % of their norm, with equal parameters: a reduction "
            "of them is missing, or the ranks computed them with other random numbers or inputs."
        )
    if reason.what == GRADIENTS:
        return (
            f"{first} ({_sides(reason)}), with equal parameters and equal numbers of the optimizer."
        )
    sides = _sides(reason)
    if reason.values:
        sides = f"{ranks(reason.values)} had no {next(iter(reason.values.values()))} any more"
    return f"{first} ({sides}), with equal parameters and gradients."


def hyper(split: Split) -> str:
    known = {"lr": "the learning rate", LOSS_SCALE: "the loss scale"}
    return known.get(split.names[0], f"`{split.names[0]}`")


def step_call(b: Breach) -> str:
    call = f"{b.history.optimizer}.step()" if b.history.optimizer else "the update"
    return f"{call}{at_line(b.history.line)}"


def _values(split: Split) -> str:
    values = short([split.values[side[0]] for side in split.sides])
    return ", ".join(
        f"{value} on {ranks(side)}" for side, value in zip(split.sides[:4], values, strict=False)
    )


def short(values: Sequence[str]) -> Sequence[str]:
    """Numbers with six digits, if they still differ (0.1 * 0.1 is 0.010000000000000002)."""
    try:
        short = [f"{float(value):.6g}" for value in values]
    except ValueError:  # None, a tuple
        return values
    return short if len(set(short)) == len(set(values)) else values


def _sides(split: Split) -> str:
    """``ranks 0, 2 agree, rank 1 differs``."""
    if len(split.sides) == sum(map(len, split.sides)):
        every = [rank for side in split.sides for rank in side]
        if len(every) == 2:
            return f"{ranks(every)} differ"
        return f"{ranks(every)} all differ from each other"
    texts = [f"{ranks(side)} {'agree' if len(side) > 1 else 'differs'}" for side in split.sides]
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")
