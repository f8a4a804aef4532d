"""Values that must be equal on several ranks are equal: parameters, and numbers of optimizers."""

from __future__ import annotations

from collections.abc import Sequence

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, law
from moediag.diagnosis.numbers.law_breaches import Breach, law_facts
from moediag.diagnosis.numbers.law_splits import GRADIENTS, HYPER, LOSS_SCALE, STATE, Split
from moediag.evidence.law_model import PART, PLACED
from moediag.result import Verdict
from moediag.result.wording import listed, plural, ranks


@law(Verdict.REPLICA_DIVERGENCE)
def replicas_apart(facts: Facts) -> Findings:
    """Values that a watched job must keep equal on several ranks differ: parameters of replicas, or
    numbers of their optimizer."""
    found = facts.of(law_facts)
    if found.breach is not None:
        reason = found.breach.reason
        first = reason.what if reason is not None else "weights"
        yield Broken(
            _of_breach(found.breach),
            pattern="initial weights" if found.breach.initial else first,
            next_step=_next_step(found.breach),
            culprits=found.breach.odd,
            lasting=found.breach.parameters is not None,  # a number may still become equal
            beside=True,
        )
    if found.apart:
        yield (
            f"All {plural(len(found.apart), 'plain parameter')} ({listed(found.apart)}) were equal "
            f"on all ranks at first and differ since step {found.apart_from}: if the ranks train "
            "one model, nothing keeps them equal."
        )


def checked(facts: Facts) -> str:
    """What held, for a job without a failure; "" without a law that was checked."""
    steps = facts.of(law_facts).checked
    return f"no law was broken in {plural(steps, 'checked step')}" if steps else ""


def not_checked(facts: Facts) -> tuple[str, ...]:
    """Which replicas were not compared, and why."""
    return facts.of(law_facts).not_checked


def _of_breach(b: Breach) -> str:
    """What differs, since when, and what differed first."""
    if b.parameters is None:
        assert b.reason is not None
        kept = "ranks that hold parts of the same parameters"
        if b.history.how != PART:
            kept = "ranks that hold the same parameters"
        at = f" of {_step_call(b)}" if b.history.line else ""
        return (
            f"In step {b.step} {_hyper(b.reason)}{at} differs between {kept}: {_values(b.reason)}."
        )
    noun = plural(len(b.parameters.names), "parameter")
    one = len(b.parameters.names) == 1
    what = f"{noun} ({listed(b.parameters.names)}) {'differs' if one else 'differ'}"
    who = _sides(b.parameters)
    if b.initial:
        kept = {
            PLACED: "have the placement Replicate",
        }.get(b.history.how, "are replicas, kept equal by reductions of their gradients")
        return (
            f"Before the first call of {_step_call(b)}, {what}: {who}. The parameters {kept}, "
            "so they must start equal: a rank loaded or initialised other values, and nothing "
            "broadcast them afterwards."
        )
    since = f"Before {_step_call(b)} of step {b.step}, {what} between replicas: {who}"
    before = f"in step {b.before} {'it was' if one else 'they were'} equal"
    return f"{since}; {before}. {_reason(b)}"


def _reason(b: Breach) -> str:
    if b.counts is not None:
        told = ", ".join(f"rank {r} {n} times" for r, n in sorted(b.counts.items())[:4])
        more = "" if len(b.counts) <= 4 else f" (of {len(b.counts)} ranks)"
        return f"Until then {_step_call(b)} was called a different number of times: {told}{more}."
    reason = b.reason
    if reason is None:
        if b.step - (b.before or 0) == 1:
            return (
                "No difference of gradients, of the optimizer's state or of its numbers was "
                "recorded there, so the update itself or something after it wrote other values."
            )
        return "What differed first lies between these two steps and was not recorded."
    if reason.what == HYPER:
        hyper = _hyper(reason)
        since = f"differs since step {reason.step}"
        return f"{hyper[:1].upper()}{hyper[1:]} {since}: {_values(reason)}."
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
    return f"{first} ({_sides(reason)}), with equal parameters and gradients."


def _hyper(split: Split) -> str:
    known = {"lr": "the learning rate", LOSS_SCALE: "the loss scale"}
    return known.get(split.names[0], f"`{split.names[0]}`")


def _step_call(b: Breach) -> str:
    at = f" at {b.history.line}" if b.history.line else ""
    return f"{b.history.optimizer}.step(){at}"


def _next_step(b: Breach) -> str:
    """What to change."""
    if b.initial:
        return (
            "Load and initialise parameters on every rank alike, or before the model is wrapped, "
            "or broadcast them from one rank."
        )
    if b.counts is not None:
        return f"Call {_step_call(b)} equally often on every rank."
    if b.reason is None:
        return (
            f"Look for what writes parameters after {_step_call(b)}; `--laws-every 1` narrows it "
            "to one step."
        )
    if b.reason.what == HYPER and b.reason.names[0] == LOSS_SCALE:
        return (
            "Make one GradScaler decision on all ranks: use ShardedGradScaler with FSDP1; a plain "
            "GradScaler looks at each rank's own gradients."
        )
    if b.reason.what == HYPER:
        return f"Give {_hyper(b.reason)} the same value on every rank."
    if b.reason.large:
        return (
            "Reduce these gradients over the ranks that hold the parameter, or give these ranks "
            "the same inputs and the same random state (dropout on replicated activations)."
        )
    if b.reason.what == GRADIENTS:
        return "Look for what changes gradients after their reduction, or leaves it out."
    return "Restore the optimizer's state alike on every rank."


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
