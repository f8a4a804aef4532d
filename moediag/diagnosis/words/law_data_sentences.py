"""Sentences about samples, gradients and norms of a watched job."""

from __future__ import annotations

from moediag.diagnosis.numbers.law_gradients import LocalNorms, NotFinite, Starved, TrainingFacts
from moediag.diagnosis.numbers.law_samples import SampleFacts, SharedSamples
from moediag.result.wording import listed, plural, ranks


def of_shared(s: SharedSamples) -> str:
    """Ranks that trained on the same samples, and how they were asked for."""
    at = f" at {s.first.line}" if s.first.line else ""
    steps = ", ".join(map(str, s.steps[:6]))
    text = (
        f"In all compared steps ({steps}) the model of {ranks(s.ranks)} was called with the same "
        "values, though these ranks average their gradients: each repeats the work of the other"
        f"{'s' if len(s.ranks) > 2 else ''}."
    )
    if s.same_part:
        return (
            f"{text} Each asked its {s.first.sampler}{at} for part {s.first.number} of "
            f"{s.first.replicas}."
        )
    if s.first.sampler:
        return f"{text} Their samples come from a {s.first.sampler}{at}."
    return text


def of_starved(s: Starved) -> str:
    what = "adapter parameter" if s.adapters else "parameter"
    which = f"{plural(len(s.names), what)} of {s.optimizer} ({listed(s.names)})"
    kind = "only gradients of zeros" if s.zero else "no gradient"
    return f"{which} had {kind} in all {s.steps} checked steps, on every rank"


def of_not_finite(n: NotFinite) -> str:
    at = f" at {n.line}" if n.line else ""
    text = (
        f"When the optimizer{at} stepped in step {n.step}, {listed(n.names)} had elements that are "
        f"not finite, on {ranks(n.ranks)}; in step {n.before} they were finite."
    )
    if n.gradients:
        text += f" In step {n.before} the gradient of {listed(n.gradients)} was not finite."
    if n.already:
        text += f" {listed(n.already)} had elements that are not finite before that."
    return text


def of_norms(n: LocalNorms) -> str:
    first = next(iter(n.norms.values()))
    at = f" at {first.line}" if first.line else ""
    norms = ", ".join(f"{one.norm:.6g} on rank {rank}" for rank, one in list(n.norms.items())[:4])
    return (
        f"In step {n.step} clip_grad_norm_{at} returned another norm on each rank ({norms}): it "
        "computed the norm of each rank's own shard, so the shards of one gradient were scaled by "
        "different factors."
    )


def notes(samples: SampleFacts, training: TrainingFacts) -> tuple[str, ...]:
    """Facts that may be deliberate."""
    found = []
    if samples.shared is not None and not samples.shared.same_part:
        found.append(of_shared(samples.shared))
    if samples.constant:
        found.append(
            f"On {ranks(samples.constant)} the model was called with the same values in all "
            "checked steps."
        )
    if samples.same_order is not None:
        order = samples.same_order
        at = f" at {order.line}" if order.line else ""
        found.append(
            f"{order.sampler}{at} gave {ranks(samples.order_ranks)} the same shuffled order in two "
            f"passes of training (epoch {order.epoch}, the second one until step {order.step}): "
            "nothing called set_epoch in between."
        )
    found += [f"{of_starved(one)}." for one in training.starved if not one.adapters]
    found += [
        f"The learning rate of {name} was 0 in all checked steps: its updates change nothing."
        for name in training.at_rest
    ]
    if training.unset:
        found.append(
            f"Before the first update, {listed(training.unset)} had elements that are not finite: "
            "they may never have been initialised."
        )
    if training.still:
        found.append(
            f"{plural(len(training.still), 'parameter')} ({listed(training.still)}) did not change "
            "between the checked steps, though gradients and learning rate were not zero: updates "
            "may round to nothing in the parameters' dtype."
        )
    return tuple(found)
