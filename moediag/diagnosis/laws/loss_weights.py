"""Every token of a batch counts the same in the gradient, and the weights of all add up to one."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.large_calls import stages
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.diagnosis.laws.mean_losses import (
    averaged_by_wrapper,
    clip_factors,
    means_added,
    micro_batches_added,
    scales_kept,
    unscaled_steps,
)
from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.reduced_gradients import REDUCTIONS, reductions
from moediag.evidence.law_model import RankLaws
from moediag.evidence.model import Evidence
from moediag.records import dataclass
from moediag.result.wording import at_line, few, few_on_each

_ENOUGH = 2  # steps
_NEAR = 0.02  # of sums of weights
_CLOSE = 1e-3  # of weights that are meant to be equal
_DETACHED = 1e-4  # of a loss of float32
_UNEQUAL = 1.25  # times that a token counts more than another one
_SUSPICIOUS = 2.0  # the same, of micro-batches: padded fine-tuning often has less
_DEVIATIONS = 2.0  # by which numbers of tokens differ that are not equal by chance


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A cross entropy, and what its backward got."""

    count: int
    """Targets that count."""
    size: int
    """All targets."""
    classes: int
    total: float
    """Sum of the tokens' weights in the gradient."""
    alike: bool
    """All tokens of it have the same weight."""


@dataclass(frozen=True, slots=True)
class StepLosses:
    """The cross entropies of one rank in one step, by backward."""

    step: int
    backwards: tuple[tuple[TokenLoss, ...], ...]
    line: str = ""
    """The user's line that computed the last one, or ""."""
    added: bool = False
    """Each backward but the first added to gradients of the one before."""
    changed: int = 0
    """How often a gradient was changed in place after the last backward; -1: it was replaced."""
    mean: tuple[int, ...] = ()
    """Ranks over whose samples FSDP or DeepSpeed takes the mean of gradients; () if unknown."""

    @property
    def total(self) -> float:
        return sum(one.total for of in self.backwards for one in of)

    @property
    def rows(self) -> int:
        """Targets of its smallest cross entropy."""
        return min((one.size for of in self.backwards for one in of), default=0)

    @property
    def single(self) -> Sequence[TokenLoss]:
        """One cross entropy of the same kind for each backward; () of others."""
        losses = [one for of in self.backwards for one in of]
        alone = all(len(of) == 1 for of in self.backwards)
        return losses if alone and len({one.classes for one in losses}) == 1 else ()

    @property
    def micro_batches(self) -> Sequence[TokenLoss]:
        """The same, alike in all but their targets."""
        alike = all(one.alike and one.count for one in self.single)
        return self.single if alike else ()


@law(suspects=True)
def micro_batches_unequal(facts: Facts) -> Findings:
    """The micro-batches of one update count the same, although they have different numbers of
    target tokens."""
    found: dict[int, tuple[int, int]] = {}
    for steps in facts.of(_losses).values():
        for step, one in steps.items():
            losses = one.micro_batches
            counts = [loss.count for loss in losses]
            alike = len(losses) > 1 and _equal([loss.total for loss in losses])
            if alike and max(counts) >= _UNEQUAL * min(counts):
                found.setdefault(step, (min(counts), max(counts)))
    if len(found) >= _ENOUGH:
        ordered = sorted(found.items(), key=lambda one: -one[1][1] / one[1][0])
        step, (least, most) = ordered[_ENOUGH - 1]  # a last batch of a pass may be short
        text = (
            f"In step {step} the micro-batches of one update had {least} to {most} target tokens, "
            f"and the mean of each counts the same: a token counts up to {most / least:.3g} times "
            "as much as another one. To train as with one large batch, divide the sum over tokens "
            "by the number of tokens of all micro-batches."
        )
        # Few masked tokens of small batches may differ that much by chance.
        chance = most - least < _DEVIATIONS * math.sqrt(most + least)
        yield text if most < _SUSPICIOUS * least or chance else Suspicious(text)


@law(suspects=True)
def parts_unequal(facts: Facts) -> Findings:
    """Ranks that exchange activations in the forward (parts of the same sequences) divide by their
    own numbers of target tokens."""
    reduced = {one.step for one in facts.of(reductions)}
    found: dict[int, dict[int, int]] = {}
    for step, ranks in facts.of(_whole_steps).items():
        losses = {rank: one.micro_batches for rank, one in ranks.items()}
        if step not in reduced or any(len(of) != 1 for of in losses.values()):
            continue
        single = {rank: of[0] for rank, of in losses.items()}
        counts = {rank: one.count for rank, one in single.items()}
        own_means = _equal([one.total for one in single.values()])
        apart = max(counts.values()) >= _UNEQUAL * min(counts.values())
        gather = (_gathers(facts.evidence, rank, step, one.size) for rank, one in single.items())
        if own_means and apart and all(gather):
            found[step] = counts
    if len(found) >= _ENOUGH:
        step, counts = next(iter(found.items()))
        times = max(counts.values()) / min(counts.values())
        yield Suspicious(
            f"In step {step} each rank divided by the number of its own target tokens "
            f"({few_on_each(counts)}), though the ranks exchange activations in the forward, as "
            "parts of the same sequences: "
            f"a token counts up to {times:.3g} times as much as another one. Divide by the number "
            "of tokens of all these ranks."
        )


@law(suspects=True)
def gradients_scaled(facts: Facts) -> Findings:
    """The gradients of a job are those of the mean loss times its number of ranks or of
    micro-batches, or divided by it, or times the scale of a GradScaler."""
    yield from scales_kept(facts)
    factors = {one.step: one.factor for one in facts.of(reductions)}
    norms = facts.of(clip_factors)
    several: dict[tuple[float, str], list[int]] = defaultdict(list)
    for step, ranks in facts.of(_whole_steps).items():
        clip = norms.get(step, 1.0)  # a part of the factor
        factor = factors[step] * len(ranks) / clip if clip and step in factors else 0.0
        averaged = facts.of(averaged_by_wrapper) or all(
            len(one.mean) == len(ranks) for one in ranks.values()
        )
        alone = len(ranks) == 1  # the last stage of a pipeline
        if step not in factors and (averaged or alone) and not _rescaled(facts, step, ranks):
            factor = 1.0
        gathered = all(_gathers(facts.evidence, r, step, of.rows) for r, of in ranks.items())
        scaled = factor and step in facts.of(unscaled_steps)
        if scaled and (found := _scaled(factor, list(ranks.values()), gathered)):
            several[found].append(step)
    if not several:
        yield from means_added(facts)
        yield from micro_batches_added(facts)
    for (times, why), steps in several.items():
        if len(steps) < _ENOUGH:
            continue
        losses = facts.of(_whole_steps)[steps[0]].values()
        at = at_line(next((one.line for one in losses if one.line), ""))
        kind = f"{times:.3g} times" if times > 1 else f"1/{1 / times:.0f} of"
        yield Suspicious(
            f"In steps {few(steps)} the weights of all target tokens in the gradient add up to "
            f"{times:.3g}, not to 1: the gradients are {kind} those of the mean loss{at}. {why}"
        )


def _rescaled(facts: Facts, step: int, ranks: Mapping[int, StepLosses]) -> bool:
    """Whether something but clipping changed gradients after the last backward, as
    ``p.grad /= micro_batches`` does."""
    clips = (sum(norm.step == step for norm in facts.of(recorded)[rank].norms) for rank in ranks)
    return any(not 0 <= one.changed <= n for one, n in zip(ranks.values(), clips, strict=True))


def _scaled(factor: float, ranks: Sequence[StepLosses], gathered: bool) -> tuple[float, str] | None:
    """By what the gradients of a step are multiplied, and why it seems so; None if by nothing that
    is known. ``factor``: what reductions multiply the mean over ranks by; ``gathered``: all ranks
    may have one loss, of what they gathered, and each the gradients of its part."""
    many = {(len(one.single), one.added) for one in ranks}
    micro, added = many.pop() if len(many) == 1 else (0, False)
    own = {round(one.total, 2) for one in ranks}
    if micro > 1 and abs(factor - 1) <= _NEAR:
        there = f"There are {micro} micro-batches in each update, so it seems that "
        if added and own == {float(micro)}:
            return float(micro), f"{there}the loss is not divided by their number."
        if added and own == {float(micro * len(ranks))}:
            why = "multiplied by that of ranks, as the Trainer does if the model is to divide by "
            return own.pop(), f"{there}the loss is not divided by their number, but {why}tokens."
        if added and own == {round(1 / micro, 2)}:
            return 1 / micro, f"{there}the loss is divided by their number once too often."
    if len(ranks) == 1:
        return None
    total = factor * sum(one.total for one in ranks) / len(ranks)
    # So many mean losses that the program adds up without dividing give the same sum.
    alike = {n for r in ranks for n in (len(r.backwards), sum(map(len, r.backwards)))}
    there = f"There are {len(ranks)} ranks, so it seems that "
    summed = abs(total - len(ranks)) <= _NEAR * len(ranks) and not gathered
    if summed and len(ranks) not in alike:
        return float(len(ranks)), f"{there}the ranks' gradients are added up and not averaged."
    if abs(total - 1 / len(ranks)) <= _NEAR / len(ranks):
        return (
            1 / len(ranks),
            f"{there}the loss or the gradients are divided by the number of ranks once too often.",
        )
    return None


@law(suspects=True)
def accumulation_not_entered(facts: Facts) -> Findings:
    """accelerate or DeepSpeed divides each loss by the micro-batches that it is asked to
    accumulate, and the program updates after each backward, or divides it, too. Or the first update
    has one micro-batch and all later ones have several."""
    many = {_later_micro_batches(own) for own in facts.of(recorded).values()}
    if len(many) == 1 and (number := many.pop()):
        lines = [one.line for own in facts.of(recorded).values() for one in own.checks if one.line]
        yield Suspicious(
            f"The first update{at_line(lines[0] if lines else '')} came after one micro-batch, and "
            f"each later one after {number}: updates come after the first micro-batch of {number} "
            "and not after the last, so the last ones of an epoch are left over. Count from 1, as "
            "in (step + 1) % accumulation == 0."
        )
    for own in facts.of(recorded).values():
        rows = own.of("accumulation", _not_entered)
        found = [one for one in rows if one is not None]
        if len(found) == len(rows) > _ENOUGH:
            by, number, line, twice = found[0]
            how = "but the program never enters `accumulate` and updates after each backward"
            step = "Put each micro-batch into `with accelerator.accumulate(model):`."
            if by == "DeepSpeed":
                how = "but an update follows after each backward"
                step = "Call set_gradient_accumulation_boundary(True) for the last one only."
            if twice:
                how = "and the program, which accumulates by hand, divided it by as many before"
                step = "Divide once: ask for one, or leave out the program's division."
            yield Suspicious(
                f"{by} is asked to accumulate {number} micro-batches, so `backward`"
                f"{at_line(line)} divides each loss by {number}, {how}: the gradients are "
                f"1/{number} of those that are meant. {step}"
            )
            return


def _later_micro_batches(own: RankLaws) -> int:
    """The backwards of each checked update but the first, if that one had one forward and one
    backward, and all others several; else 0."""
    backwards = dict(own.of("losses", lambda one: (int(one["step"]), len(one["backwards"]))))
    forwards = Counter(one.step for one in own.inputs)
    later = {many for step, many in backwards.items() if step > 1}
    seen = len(backwards) > _ENOUGH and all(forwards[s] == n for s, n in backwards.items())
    return later.pop() if seen and backwards.get(1) == len(later) == 1 < min(later) else 0


def _not_entered(event: Mapping[str, Any]) -> tuple[str, int, str, bool] | None:
    """Who divides each loss, and by what, the backward's line, and whether the program does, too;
    None of an accumulation."""
    by, number = str(event.get("by", "accelerate")), int(event["micro_batches"])
    twice = bool(event.get("twice")) and event["backwards"] == number
    alone = (event["backwards"] == 1 or twice) and not event["entered"]
    return (by, number, str(event["line"]), twice) if alone else None


@law(suspects=True)
def loss_parts_detached(facts: Facts) -> Findings:
    """A part of a loss changes from step to step and has no gradient."""
    for own in facts.of(recorded).values():
        rows = own.of("losses", _rests)
        rests = {rest for _, _, rest, _ in rows}
        whole = [abs(rest) > _DETACHED * abs(loss) for _, loss, rest, _ in rows]
        apart = max(rests, default=0.0) - min(rests, default=0.0)
        if len(rows) > _ENOUGH and all(whole) and apart > _DETACHED * max(map(abs, rests)):
            told = ", ".join(
                f"{rest:.4g} of {loss:.4g} in step {step}" for step, loss, rest, _ in rows[:3]
            )
            yield Suspicious(
                f"A part of the loss{at_line(rows[0][-1])} changes from step to step and has no "
                f"gradient ({told}), so it trains nothing. Look for detach, no_grad, argmax or "
                "item() in what is added to the loss, such as an auxiliary loss that balances "
                "experts."
            )
            return


def _rests(event: Mapping[str, Any]) -> tuple[int, float, float, str]:
    """The step, the loss of its first backward, what in it has no gradient, and its line."""
    loss, rest = event["backwards"][0]["rest"]
    return int(event["step"]), float(loss), float(rest), str(event.get("line", ""))


def _losses(evidence: Evidence) -> dict[int, dict[int, StepLosses]]:
    """By rank and step; only of steps whose losses were made of cross entropies alone."""
    return {
        rank: {one.step: one for one in own.of("losses", _read) if one is not None}
        for rank, own in recorded(evidence).items()
    }


def _whole_steps(evidence: Evidence) -> dict[int, dict[int, StepLosses]]:
    """By step and rank; only steps that all ranks recorded, but for stages of a pipeline that have
    no loss."""
    laws, sends = recorded(evidence), {rank for rank, _ in stages(evidence)}
    without = {r for r in laws if r in sends and not laws[r].others.get("losses")}
    rows = {r: steps.items() for r, steps in _losses(evidence).items() if r not in without}
    every = len(laws) == evidence.world_size > 1
    return agreement.together(rows) if every else {}


def _gathers(evidence: Evidence, rank: int, step: int, tokens: int) -> bool:
    """Whether a rank sent something to others before its gradients were reduced that has a number
    for each token, and is no parameter."""
    calls = (call for call in evidence.ranks[rank].collectives if call.step == step)
    before = takewhile(lambda call: call.op not in REDUCTIONS or call.phase == "forward", calls)
    return any(
        call.op in ("all_gather", "send")
        and "float" in call.dtype
        and call.numel_in >= tokens
        and not call.parameters
        for call in before
    )


def _equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= _CLOSE * max(map(abs, values))


def _read(event: Mapping[str, Any]) -> StepLosses | None:
    backwards = event["backwards"]
    if not all(one["direct"] and one["of"] for one in backwards):
        return None
    losses = tuple(tuple(map(_loss, one["of"])) for one in backwards)
    added = [bool(one.get("added")) for one in backwards[1:]]
    return StepLosses(
        int(event["step"]), losses, str(event.get("line", "")), all(added),
        int(event.get("changed", 0)), tuple(event.get("mean", ())),
    )  # fmt: skip


def _loss(values: Sequence[Any]) -> TokenLoss:
    count, size, classes, total, least, most, *_ = values
    alike = float(most) - float(least) <= _CLOSE * abs(float(most))
    return TokenLoss(int(count), int(size), int(classes), float(total), alike)
