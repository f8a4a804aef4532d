"""Values that must be equal on several ranks are equal: parameters, and numbers of optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.clip_norms import norms_told
from moediag.diagnosis.laws.large_calls import (
    adds_in_forward,
    all_calls_small,
    averaged,
    exchanges,
    sends_nothing,
)
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.diagnosis.numbers.law_breaches import Apart, Breach, law_facts
from moediag.diagnosis.numbers.law_splits import GRADIENTS, HYPER, LOSS_SCALE, STATE, Split
from moediag.diagnosis.numbers.reduced_gradients import not_reduced
from moediag.evidence.law_model import PART, PLACED, PLAIN
from moediag.evidence.model import Evidence
from moediag.result import Verdict
from moediag.result.wording import UNCHECKED, at_line, listed, plural, ranks


@law(Verdict.REPLICA_DIVERGENCE)
def replicas_apart(facts: Facts) -> Findings:
    """Values that a watched job must keep equal on several ranks differ: parameters of replicas, or
    numbers of their optimizer."""
    found = facts.of(law_facts)
    breach, averages = found.breach, facts.of(averaged)
    alone = breach is not None and bool(_not_reduced(breach, facts))
    if breach is not None and averages and alone:
        yield Suspicious(
            f"{_of_breach(breach)} {_not_reduced(breach, facts)} The program also averages or "
            "sends its parameters itself."
        )
    elif breach is not None:
        reason = breach.reason
        first = reason.what if reason is not None else "weights"
        yield Broken(
            f"{_of_breach(breach)} {_not_reduced(breach, facts)} {_owners(facts, breach)}".rstrip(),
            pattern="initial weights" if breach.initial else first,
            next_step=_next_step(breach, facts),
            culprits=breach.odd,
            # A number may still become equal, and a program that reduces no gradients may average
            # the parameters later.
            lasting=breach.parameters is not None and not alone,
            beside=True,
            names=breach.parameters.names if breach.parameters is not None else (),
        )
    apart = _apart(facts)
    if apart is not None:
        yield _of_apart(apart, facts)
    elif found.numbers is not None and breach is None:
        yield Suspicious(_of_breach(found.numbers))


def _apart(facts: Facts) -> Apart | None:
    """Parameters that nothing keeps equal. Local SGD averages those that its wrapper does not, and
    copies that were discarded may differ if calls can keep the model equal."""
    found = facts.of(law_facts)
    apart = found.apart if facts.of(all_calls_small) else found.apart_kept
    if apart is None or (apart.unsynchronised and not facts.of(sends_nothing)):
        return None
    # Nothing else shows that ranks whose other matrices differ from the beginning train one model.
    return apart if not apart.alone or facts.of(adds_in_forward) else None


def _of_apart(apart: Apart, facts: Facts) -> Broken | Suspicious | str:
    """What is said of parameters that no wrapper keeps equal."""
    if facts.of(exchanges) and not apart.still:
        apart = replace(apart, names=apart.every)
    many, names = plural(len(apart.names), "parameter"), listed(apart.names)
    one = len(apart.names) == 1
    was, differ = ("was", "differs") if one else ("were", "differ")
    if apart.still:
        others = "the others" if len(facts.of(recorded)) > 2 else "the other rank"
        return Broken(
            f"{many} ({names}) kept {'its' if one else 'their'} first value on "
            f"{ranks(apart.still)}, with gradients in all checked steps, and changed on {others}; "
            "the remaining parameters are updated alike on all ranks: an update that one rank made "
            "did not reach the others.",
            pattern="update not sent",
            next_step="Send every updated parameter from the rank that updates it to all others.",
            names=apart.names,
        )
    if facts.of(exchanges):
        text = (
            f"{many} ({names}) {was} equal on all ranks at first and {differ} since step "
            f"{apart.since}. The ranks exchange samples or their gradients (all_to_all), so each "
            "may have experts or tables of its own"
        )
        held = tuple(name for name in apart.names if "expert" not in name.lower())
        if not facts.of(_has_experts) or not held:
            return f"{text}."
        return Suspicious(
            f"{text}, but not a router, or layers outside the experts ({listed(held)}): nothing "
            f"keeps these equal.{_reasons(replace(apart, names=held), facts)}",
            held,
        )
    if apart.alone:
        return Suspicious(
            f"{many} ({names}) {was} equal on all ranks at first and {differ} since step "
            f"{apart.since}, though the ranks add up activations in the forward, as parts of one "
            f"model do: what all of them hold must stay equal.{_reasons(apart, facts)}",
            apart.names,
        )
    if not apart.whole:
        others = "the other parameters stay equal while they train"
        if apart.same_loss:
            others = (
                "before the first update the ranks computed equal gradients of other matrices and "
                "different ones of these"
            )
        own = [name for name in apart.names if name in facts.of(not_reduced)]
        why = "a reduction of their gradients or of their values may be missing."
        if own:
            why = (
                f"the gradients of other parameters are added up over the ranks between backward "
                f"and update, and those of {listed(own)} are not."
            )
        return Suspicious(
            f"{many} ({names}) {differ} between ranks since step {apart.since}. "
            f"{'It' if one else 'They'} {was} equal at first, and {others}: {why}",
            apart.names,
        )
    text = (
        f"{'The parameter' if one else f'All {many}'} that no wrapper keeps equal ({names}) {was} "
        f"equal on all ranks at first and {differ} since step {apart.since}"
    )
    why, step = _why_unwrapped(apart, facts)
    if why and not facts.of(averaged) and not facts.of(_searches):
        return Broken(
            f"{text}: every rank trains a model of its own. {why}",
            pattern="not wrapped",
            next_step=step,
            beside=True,
            names=apart.names,
        )
    return Suspicious(
        f"{text}: if the ranks train one model, nothing keeps them equal.{_reasons(apart, facts)}",
        apart.names,
    )


def _reasons(apart: Apart, facts: Facts) -> str:
    """What differed before the parameters did, after a blank; or ""."""
    if told := norms_told(facts, apart.names) or facts.of(_renewed):
        return f" {told}"
    return f" {_reason(apart.breach)}" if apart.breach is not None else ""


def _renewed(evidence: Evidence) -> str:
    """How many optimizers each rank made for the same parameters, if that differs; else ""."""
    keys: dict[str, dict[int, set[str]]] = {}
    for rank, own in recorded(evidence).items():
        for check in own.checks:
            keys.setdefault(check.key.partition(".")[0], {}).setdefault(rank, set()).add(check.key)
    for of in keys.values():
        if len({len(made) for made in of.values()}) > 1:
            told = ", ".join(f"{len(made)} on rank {rank}" for rank, made in list(of.items())[:4])
            return (
                f"Optimizers were made anew for them on some ranks (seen: {told}): a new one "
                "begins without moments."
            )
    return ""


def _has_experts(evidence: Evidence) -> bool:
    """Whether names of parameters say which ones are those of experts."""
    every = (check for own in recorded(evidence).values() for check in own.checks[:1])
    return any("expert" in piece.name.lower() for check in every for piece in check.pieces)


def _why_unwrapped(apart: Apart, facts: Facts) -> tuple[str, str]:
    """What says that the ranks train one model, and what to change; ("", "") if nothing does."""
    laws = facts.of(recorded)
    unwrapped = [own.of("unwrapped", _line_of) for own in laws.values()]
    if all(unwrapped) and len(laws) > 1:
        model, line = unwrapped[0][0]
        return (
            f"accelerate's prepare{at_line(line)} returned {model} without "
            "DistributedDataParallel, though it runs several processes.",
            "Do not prepare the model before training, as Trainer.evaluate() and "
            "prepare_model(evaluation_mode=True) do: accelerate 1.14 and 1.15 then take it for "
            "wrapped. Or use accelerate 1.13.",
        )
    bare = _lines(facts, "bare")
    hows = {piece.how for own in laws.values() for one in own.checks for piece in one.pieces}
    if len(bare) == len(laws) > 1 and hows == {PLAIN}:
        return (
            "DistributedDataParallel wrapped the model, and the wrapper does not exist any more: "
            f"the model is called without it{_at(bare[0])}.",
            "Train what the wrapping call returned, as model = accelerator.prepare(model) does.",
        )
    if apart.unsynchronised:
        line = next((line for line in _lines(facts, "unreduced") if line), "")
        return (
            f"DistributedDataParallel was told not to reduce gradients in every update{_at(line)}, "
            "and no call of the ranks carried gradients or parameters.",
            "Leave no_sync, or set require_backward_grad_sync, for the last backward before each "
            "update.",
        )
    if apart.lone_group:
        return (
            "DistributedDataParallel was given a process group of one rank, so it reduces nothing.",
            "Give DistributedDataParallel a group of all ranks that train these parameters, those "
            "of sequence parallelism included.",
        )
    samplers = {one for own in laws.values() for one in own.inputs if one.replicas > 1}
    numbers = {one.number for one in samplers}
    if len(numbers) == len(laws) > 1 and all_calls_small(facts.evidence):
        first = next(iter(sorted(samplers, key=lambda one: one.number)))
        return (
            f"Its {first.sampler}{at_line(first.line)} divides the samples among {first.replicas} "
            "ranks, and no call of the ranks was large enough to carry gradients or parameters.",
            "Wrap the model in DistributedDataParallel, or reduce its gradients before each "
            "update.",
        )
    return "", ""


def _at(line: str) -> str:
    return f" (first at {line})" if line else ""


def _line_of(event: Mapping[str, Any]) -> tuple[str, str]:
    return str(event.get("model", "")), str(event.get("line") or "")


def _lines(facts: Facts, kind: str) -> list[str]:
    """The lines, one for each rank: "unreduced", of an update before which every call of a wrapper
    was inside no_sync; "bare", that called a wrapped model without its wrapper."""
    return [line for own in facts.of(recorded).values() for _, line in own.of(kind, _line_of)[:1]]


def _not_reduced(breach: Breach, facts: Facts) -> str:
    """Why gradients were not reduced, if that explains the breach; "" where something else, such as
    a learning rate, differed first."""
    other = breach.reason is not None and breach.reason.what != GRADIENTS
    if breach.parameters is None or breach.initial or breach.counts is not None or other:
        return ""
    lines, unreduced = list(filter(None, _lines(facts, "bare"))), _lines(facts, "unreduced")
    if not lines and unreduced:
        return (
            f"Before the update at {unreduced[0]} every call of DistributedDataParallel "
            "was inside no_sync, so no gradient was reduced."
        )
    if not lines:
        return ""
    return (
        f"The model inside DistributedDataParallel was called without it, at {lines[0]}: the "
        "backward of such a call reduces nothing."
    )


def _owners(facts: Facts, breach: Breach) -> str:
    """Which optimizers have the first parameter that differs, if only some have it (ZeRO)."""
    if breach.parameters is None or breach.history.optimizer:
        return ""
    name = breach.parameters.names[0]
    who = [
        rank
        for rank, own in facts.of(recorded).items()
        if any(name in check.owned for check in own.checks)
    ]
    if not 0 < len(who) < len(breach.history.ranks):
        return ""
    return f"Only the optimizer of {ranks(who)} has {name}: its update did not reach the others."


def _searches(evidence: Evidence) -> bool:
    """Whether ranks began with other numbers of the optimizer: a search trains a model of its own
    on each."""
    numbers = [own.checks[0].hyper for own in recorded(evidence).values() if own.checks]
    return any(one != numbers[0] for one in numbers)


def checked(facts: Facts) -> str:
    """What held, for a job without a failure; "" if no law was checked."""
    steps = facts.of(law_facts).checked
    if steps:
        return f"no law was broken in {plural(steps, 'checked step')}"
    hows = {
        piece.how
        for laws in facts.of(recorded).values()
        for check in laws.checks
        for piece in check.pieces
    }
    if not hows:
        return ""
    why = ": no two ranks hold the same parameters" if hows == {PART} else ""
    return f"no law was broken, but {UNCHECKED}{why}"


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
        late = " at the latest" if reason.step - (b.before or 0) > 1 else ""
        since = f"differs{late} since step {reason.step}"
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
    sides = _sides(reason)
    if reason.values:
        sides = f"{ranks(reason.values)} had no {next(iter(reason.values.values()))} any more"
    return f"{first} ({sides}), with equal parameters and gradients."


def _hyper(split: Split) -> str:
    known = {"lr": "the learning rate", LOSS_SCALE: "the loss scale"}
    return known.get(split.names[0], f"`{split.names[0]}`")


def _step_call(b: Breach) -> str:
    call = f"{b.history.optimizer}.step()" if b.history.optimizer else "the update"
    return f"{call}{at_line(b.history.line)}"


def _next_step(b: Breach, facts: Facts) -> str:
    """What to change."""
    unreduced = _not_reduced(b, facts)
    if unreduced and _lines(facts, "bare"):
        return "Call the wrapper, not the model inside it, wherever gradients are computed."
    if unreduced:
        return "Leave no_sync for the last backward before each update."
    if not b.history.optimizer:
        return "Send every updated parameter from the rank that updates it to all others."
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
