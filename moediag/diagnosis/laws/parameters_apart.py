"""Parameters that no wrapper keeps equal, and that were equal on several ranks at first."""

from __future__ import annotations

from dataclasses import replace

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.breach_words import reason_of
from moediag.diagnosis.laws.clip_norms import norms_told
from moediag.diagnosis.laws.large_calls import (
    adds_gradients,
    adds_inside,
    all_calls_small,
    averaged,
    divides_inside,
    exchanges,
    meets_in_forward,
    sends_nothing,
)
from moediag.diagnosis.laws.law import Broken, Suspicious, recorded
from moediag.diagnosis.laws.unreduced_calls import line_of, lines_of
from moediag.diagnosis.numbers.law_breaches import Apart, law_facts
from moediag.diagnosis.numbers.reduced_gradients import not_reduced
from moediag.evidence.law_model import PLAIN, REDUCED, LawPiece
from moediag.evidence.model import Evidence
from moediag.result.wording import agreeing, at_line, few_on_each, listed, plural, ranks


def parameters_apart(facts: Facts) -> Apart | None:
    """Parameters that nothing keeps equal. Local SGD averages those that its wrapper does not, and
    copies that were discarded may differ if calls can keep the model equal."""
    found = facts.of(law_facts)
    apart = found.apart if facts.of(all_calls_small) else found.apart_kept
    if apart is None or (apart.unsynchronised and not facts.of(sends_nothing)):
        return None
    # Nothing else shows that ranks whose other matrices differ from the beginning train one model.
    one = apart.beside or facts.of(adds_inside) or facts.of(exchanges)
    return apart if one or not apart.alone else None


def of_apart(apart: Apart, facts: Facts) -> Broken | Suspicious | str:
    """What is said of parameters that no wrapper keeps equal."""
    if facts.of(exchanges) and not (apart.still or apart.unsynchronised):
        apart = replace(apart, names=apart.every)
    one, told = len(apart.names) == 1, listed(apart.names)
    if apart.beside or not any("." in n for n in apart.names):  # also of a model's own
        every = (c for own in facts.of(recorded).values() for c in own.checks if c.optimizer)
        by = next((c for c in every if not {*c.names}.isdisjoint(apart.names)), None)
        told += f", updated by {by.optimizer}.step(){at_line(by.line)}" if by else ""
    names = f"{plural(len(apart.names), 'parameter')} ({told})"
    were_equal = (
        f"{agreeing('was', apart.names)} equal on all ranks at first and "
        f"{agreeing('differs', apart.names)} since step {apart.since}"
    )
    if apart.still:
        others = "the others" if len(facts.of(recorded)) > 2 else "the other rank"
        return Broken(
            f"{names} kept {'its' if one else 'their'} first value on "
            f"{ranks(apart.still)}, with gradients in all checked steps, and changed on {others}; "
            "the remaining parameters are updated alike on all ranks: an update that one rank made "
            "did not reach the others.",
            pattern="update not sent",
            next_step="Send every updated parameter from the rank that updates it to all others.",
            names=apart.names,
        )
    if facts.of(exchanges) and not apart.unsynchronised:
        text = (
            f"{names} {were_equal}. The ranks exchange samples or their gradients (all_to_all), so "
            "each may have experts or tables of its own"
        )
        held = tuple(name for name in apart.names if "expert" not in name.lower())
        if not (facts.of(_has_experts) or apart.alone) or not held:
            return f"{text}."
        why = "nothing keeps these equal"
        if facts.of(wraps_a_part):
            why += ", as the wrapper reduces gradients of other parameters only"
        return Suspicious(
            f"{text}, but not a router, or layers outside the experts ({listed(held)}): {why}."
            f"{_reasons(replace(apart, names=held), facts)}",
            held,
        )
    if apart.alone:
        why = (
            "the ranks add up activations or their gradients inside the model, as parts of one do: "
            "what all of them hold must stay equal."
        )
        if apart.beside:
            what, place = "are DTensors", "the plan of parallelism"
            if facts.of(wraps_a_part):
                what, place = "are kept equal by a wrapper", "it"
            why = (
                f"all matrices {what}: parameters outside {place} must stay equal, and nothing "
                "adds up their gradients."
            )
        text = f"{names} {were_equal}, though {why}{_reasons(apart, facts)}"
        if apart.beside and apart.breach and apart.breach.reason and apart.breach.reason.large:
            return Broken(
                text,
                pattern="beside DTensors",
                next_step="Make them DTensors of the same mesh, or add up their gradients over the "
                "ranks before the update.",
                names=apart.names,
            )
        return Suspicious(text, apart.names)
    if facts.of(divides_inside) and facts.of(_wraps_others) and not apart.unsynchronised:
        return (
            f"{names} {were_equal}. No wrapper has {'it' if one else 'them'}, and the ranks gather "
            "and add up activations in the forward, so each may have its part of a layer."
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
            f"{names} {agreeing('differs', apart.names)} between ranks since step {apart.since}. "
            f"{'It was' if one else 'They were'} equal at first, and {others}: {why}",
            apart.names,
        )
    text = (
        f"{'The parameter' if one else f'All {len(apart.names):,} parameters'} that no wrapper "
        f"keeps equal ({told}) {were_equal}"
    )
    why, step = _why_unwrapped(apart, facts)
    if why and not facts.of(averaged) and not facts.of(trains_own) and not facts.of(_hooked):
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
    return f" {reason_of(apart.breach)}" if apart.breach is not None else ""


def _renewed(evidence: Evidence) -> str:
    """How many optimizers each rank made for the same parameters, if that differs; else ""."""
    keys: dict[str, dict[int, set[str]]] = {}
    for rank, own in recorded(evidence).items():
        for check in own.checks:
            keys.setdefault(check.key.partition(".")[0], {}).setdefault(rank, set()).add(check.key)
    for of in keys.values():
        if len({len(made) for made in of.values()}) > 1:
            told = few_on_each({rank: len(made) for rank, made in of.items()})
            return (
                f"Optimizers were made anew for them on some ranks (seen: {told}): a new one "
                "begins without moments."
            )
    return ""


def _has_experts(evidence: Evidence) -> bool:
    """Whether names of parameters say which ones are those of experts."""
    return any("expert" in piece.name.lower() for piece in _pieces(evidence))


def wraps_a_part(evidence: Evidence) -> bool:
    """Whether a wrapper keeps some parameters equal on all ranks, and leaves others out."""
    kept = {(p.how, p.ranks) for p in _pieces(evidence) if p.how in (REDUCED, PLAIN)}
    return {(REDUCED, tuple(sorted(evidence.ranks))), (PLAIN, ())} == kept


def _wraps_others(evidence: Evidence) -> bool:
    """Whether a wrapper has some parameters on all ranks, and none has others."""
    hows = {(p.how == PLAIN, p.ranks) for p in _pieces(evidence)}
    return {(False, tuple(sorted(evidence.ranks))), (True, ())} == hows


def _pieces(evidence: Evidence) -> list[LawPiece]:
    return [p for own in recorded(evidence).values() for c in own.checks[:1] for p in c.pieces]


def _why_unwrapped(apart: Apart, facts: Facts) -> tuple[str, str]:
    """What says that the ranks train one model, and what to change; ("", "") if nothing does."""
    laws = facts.of(recorded)
    unwrapped = [own.of("unwrapped", line_of) for own in laws.values()]
    if all(unwrapped) and len(laws) > 1:
        model, line = unwrapped[0][0]
        return (
            f"accelerate's prepare{at_line(line)} returned {model} without "
            "DistributedDataParallel, though it runs several processes.",
            "Do not prepare the model before training, as Trainer.evaluate() and "
            "prepare_model(evaluation_mode=True) do: accelerate 1.14 and 1.15 then take it for "
            "wrapped. Or use accelerate 1.13.",
        )
    bare = lines_of(facts, "bare")
    hows = {piece.how for own in laws.values() for piece in own.pieces}
    if len(bare) == len(laws) > 1 and hows == {PLAIN}:
        return (
            "DistributedDataParallel wrapped the model, and the wrapper does not exist any more: "
            f"the model is called without it{at_line(bare[0])}.",
            "Train what the wrapping call returned, as model = accelerator.prepare(model) does.",
        )
    if apart.unsynchronised:
        line = next((line for line in lines_of(facts, "unreduced") if line), "")
        return (
            "DistributedDataParallel was told not to reduce gradients in every update"
            f"{at_line(line)}, and nothing averages the parameters.",
            "Leave no_sync, or set require_backward_grad_sync, for the last backward before each "
            "update.",
        )
    groups = {len(piece.ranks) for piece in _pieces(facts.evidence) if piece.how == REDUCED}
    partly = groups == {1, len(laws)} and any(samples_divided(facts, sent=True))
    if (apart.lone_group or partly) and meets_in_forward(facts.evidence) == apart.lone_group:
        return (
            "DistributedDataParallel was given a process group of one rank, so it reduces nothing.",
            "Give DistributedDataParallel a group of all ranks that train these parameters, those "
            "of sequence parallelism included.",
        )
    if adds_gradients(facts.evidence, apart.names):
        return (
            "In the backward of each step the ranks add up as many numbers as these parameters "
            "have, their gradients, and something changes the gradients after that, such as "
            "another backward of the same step, which reduces nothing.",
            "Reduce the gradients once, between the last backward and the update.",
        )
    return samples_divided(facts)


def samples_divided(facts: Facts, sent: bool = False) -> tuple[str, str]:
    """That a sampler divides the samples among the ranks, though nothing averages what they train,
    and what to change; ("", "") otherwise. ``sent``: also if calls were large enough for it."""
    laws = facts.of(recorded)
    samplers = {one for own in laws.values() for one in own.inputs if one.replicas > 1}
    numbers = {one.number for one in samplers}
    if len(numbers) == len(laws) > 1 and (sent or all_calls_small(facts.evidence)):
        first = min(samplers, key=lambda one: one.number)
        return (
            f"Its {first.sampler}{at_line(first.line)} divides the samples among {first.replicas} "
            "ranks, and no call of the ranks was large enough to carry gradients or parameters.",
            "Wrap the model in DistributedDataParallel, or reduce its gradients before each "
            "update.",
        )
    return "", ""


def _hooked(evidence: Evidence) -> bool:
    """Whether a communication hook takes the place of the reduction."""
    return any(own.of("hooked", bool) for own in recorded(evidence).values())


def trains_own(evidence: Evidence) -> bool:
    """Whether each rank trains a model of its own on purpose: ranks began with other numbers of the
    optimizer, as in a search, or each saves matrices to files of its own."""
    laws = recorded(evidence).values()
    files = [{*own.rows("saved", file=str)} for own in laws]
    if all(files) and len({file for of in files for file in of}) == sum(map(len, files)) > 1:
        return True
    numbers = [own.checks[0].hyper for own in recorded(evidence).values() if own.checks]
    return any(one != numbers[0] for one in numbers)
