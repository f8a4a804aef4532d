"""Ranks that average their gradients train on different samples."""

from __future__ import annotations

from collections import defaultdict

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.large_calls import least_matrix, meets_in_forward, stages
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.reduced_gradients import REDUCTIONS
from moediag.evidence.law_model import ModelInputs
from moediag.evidence.model import Evidence
from moediag.records import dataclass
from moediag.result import Verdict
from moediag.result.wording import at_line, few, ranks

_ENOUGH = 2  # steps; one may be equal by chance, such as a warm-up
_CONSTANT = 3  # steps with the same values
_MANY = 64  # elements that are no numbers for a log
_LOSS = 1e-3  # by which losses of the same computation may differ


@dataclass(frozen=True, slots=True)
class SharedSamples:
    """Ranks whose model was called with the same values in every compared step, or in each of
    several until some step."""

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    first: ModelInputs
    same_part: bool
    """All of them asked a DistributedSampler for the same part, of several."""
    every_part: bool = False
    """Other ranks of theirs asked for all other parts: those of one part may divide its samples."""
    same_loss: bool = True
    """Their losses were equal, as far as that is known: they also computed the same."""
    all: bool = True
    """Later steps had the same values, too. Otherwise the random states of the ranks parted."""

    @property
    def sentence(self) -> str:
        """Which samples were the same, and how they were asked for."""
        first = self.first
        others = "others" if len(self.ranks) > 2 else "other"
        which = "In all compared steps" if self.all else "In the first compared steps"
        text = (
            f"{which} ({few(self.steps)}) the model of "
            f"{ranks(self.ranks)} was called with the same values, though these ranks average "
            f"their gradients: each repeats the work of the {others}."
        )
        if self.same_part:
            text += f" Each asked its {first.sampler}{at_line(first.line)} for part "
            text += f"{first.number} of {first.replicas}."
        elif first.sampler:
            text += f" Their samples come from a {first.sampler}{at_line(first.line)}."
        if first.made and first.sampler:
            text += f" Its data loader was made at {first.made}."
        return text


@law(Verdict.WRONG_GRADIENTS)
def same_part(facts: Facts) -> Findings:
    """Ranks of a watched job that average their gradients trained on the same samples: they asked a
    DistributedSampler for the same part, or their loaders read the same part of a dataset."""
    found = _shared(facts.of(_steps), facts.of(averaging), facts.of(_losses))
    if found is None or (facts.of(_divides_layers) and not found.same_part):
        return
    if found.same_part and not found.every_part:
        yield Broken(
            found.sentence,
            pattern="same part",
            next_step="Give DistributedSampler each rank's own `rank`.",
        )
    elif found.first.sampler and found.same_loss and not facts.of(meets_in_forward):
        step = "Give the loader a DistributedSampler, so that each rank reads its own part."
        if "Distributed" in found.first.sampler:
            step = f"Find out why {found.first.sampler} gives these ranks the same samples."
        yield Broken(found.sentence, pattern="same samples", next_step=step)
    else:  # made-up data, or ranks that split each sample between them
        yield Suspicious(found.sentence)


def _divides_layers(evidence: Evidence) -> bool:
    """Whether ranks hold other parameters under the same names and add up as many elements of
    activations in the forward as in the backward, in several steps: they divide layers, and have
    to work on the same samples."""
    for seen in evidence.ranks.values():
        sizes: dict[str, set[tuple[int, int]]] = {"forward": set(), "backward": set()}
        for call in seen.collectives:
            if call.op == "all_reduce" and call.phase in sizes and call.numel_in >= _MANY:
                sizes[call.phase].add((call.step, call.numel_in))
        if len({step for step, _ in sizes["forward"] & sizes["backward"]}) < _ENOUGH:
            return False
    checks = (check for own in recorded(evidence).values() for check in own.checks[:1])
    values = {one for check in checks for one in zip(check.names, check.params, strict=False)}
    return len(values) > len({name for name, _ in values})


@law(suspects=True)
def constant_samples(facts: Facts) -> Findings:
    """A model was called with the same values in all checked steps; suspicious if its data loader,
    which has more than one batch, began anew for each."""
    found = [rank for rank, steps in facts.of(_steps).items() if _constant(steps)]
    if found:
        text = f"On {ranks(found)} the model was called with the same values in all checked steps"
        calls = [step[-1] for step in facts.of(_steps)[found[0]].values()]
        new = len({one.began for one in calls}) == len(calls) and calls[0].began >= 0
        if new and calls[0].given >= 2 * calls[0].divided * (calls[0].batch or calls[0].rows):
            yield Suspicious(
                f"{text}: for each step the program asks its data loader for the first batch again"
                f"{at_line(calls[0].line)}. Make one iterator of it for each epoch."
            )
            return
        yield f"{text}."


@law()
def same_order(facts: Facts) -> Findings:
    """A DistributedSampler that shuffles gave the same order in two passes of training."""
    fields = {"sampler": str, "line": str, "epoch": int, "step": int}
    rows = {rank: own.rows("same_order", **fields) for rank, own in facts.of(recorded).items()}
    orders = {rank: of[0] for rank, of in rows.items() if of}
    if orders:
        sampler, line, epoch, step = next(iter(orders.values()))
        yield (
            f"{sampler}{at_line(line)} gave {ranks(orders)} the same shuffled order in two passes "
            f"of training (epoch {epoch}, the second one until step {step}): nothing called "
            "set_epoch in between."
        )


@law(suspects=True)
def streams_repeated(facts: Facts) -> Findings:
    """All workers of a data loader of a stream give the same batches."""
    every = facts.of(recorded).items()
    rows = {rank: own.rows("repeated", line=str, made=str, workers=int) for rank, own in every}
    found = {rank: of[0] for rank, of in rows.items() if of}
    if found:
        line, made, workers = next(iter(found.values()))
        yield Suspicious(
            f"On {ranks(found)} all {workers} workers of the data loader{at_line(made or line)} "
            f"give the same batches: the model trains on each one {workers} times. Let the "
            "IterableDataset take its worker's part, as get_worker_info() tells it."
        )


_Steps = dict[int, list[ModelInputs]]  # the calls of each step


def _steps(evidence: Evidence) -> dict[int, _Steps]:
    found: dict[int, _Steps] = {}
    for rank, own in recorded(evidence).items():
        steps = found.setdefault(rank, defaultdict(list))
        for one in own.inputs:
            steps[one.step].append(one)
    return found


def _constant(steps: _Steps) -> bool:
    least = min(map(len, steps.values()), default=0)  # micro-batches may be left out
    every = [tuple(call.digest for call in calls[:least]) for calls in steps.values()]
    return len(every) >= _CONSTANT and len(set(every)) == 1


def averaging(evidence: Evidence) -> set[tuple[int, ...]]:
    """The sets of ranks that average gradients: those of wrappers; without one the members of each
    group over which all of them add up matrices, if no two of them communicate in the forward or
    send each other activations."""
    overs = {one.over for own in recorded(evidence).values() for one in own.inputs}
    if any(overs):
        return overs
    every, least = tuple(sorted(evidence.ranks)), least_matrix(evidence)
    pipeline = stages(evidence)  # which sends between its forwards
    adds: dict[tuple[int, ...], set[int]] = defaultdict(set)
    large: dict[tuple[int, ...], set[int]] = defaultdict(set)
    meet: set[frozenset[int]] = set()
    for rank, seen in evidence.ranks.items():
        for call in seen.collectives:
            group = seen.groups.get(call.group)
            over = tuple(sorted(group.ranks)) if group and group.ranks else every
            sends = call.peer is not None and (rank, call.step) in pipeline
            if sends or (call.phase == "forward" and call.op != "broadcast"):
                meet.add(frozenset(over if call.peer is None else (rank, call.peer)))
            elif call.op in REDUCTIONS and call.step >= _ENOUGH:
                adds[over].add(rank)
                if "float" in call.dtype and max(call.numel_in, call.numel_out) >= least:
                    large[over].add(call.step)
    return {
        over
        for over, who in adds.items()
        if who == set(over)
        and len(large[over]) >= _ENOUGH
        and all(len(met.intersection(over)) < 2 for met in meet)
    }


def _losses(evidence: Evidence) -> dict[int, dict[int, float]]:
    """The first loss of each step, by rank."""
    laws = recorded(evidence).items()
    return {rank: dict(own.rows("loss", step=int, loss=float)) for rank, own in laws}


def _shared(
    found: dict[int, _Steps], overs: set[tuple[int, ...]], losses: dict[int, dict[int, float]]
) -> SharedSamples | None:
    """The largest side of ranks with the same samples. Constant inputs say nothing: they are made
    up, as in a benchmark."""
    best: SharedSamples | None = None
    for over in sorted(overs):
        if len(over) < 2 or not set(over) <= found.keys():
            continue
        if any(_constant(found[rank]) for rank in over):
            continue
        common = set.intersection(*(set(found[rank]) for rank in over))
        steps = tuple(sorted(s for s in common if len({len(found[rank][s]) for rank in over}) == 1))
        if len(steps) < _ENOUGH:
            continue
        rows = {s: {tuple(c.digest for c in found[rank][s]) for rank in over} for s in steps}
        parted = next((at for at, s in enumerate(steps) if len(rows[s]) > 1), len(steps))
        whole = len(steps)
        if parted >= _CONSTANT and 2 * parted >= whole:
            steps = steps[:parted]
        seen = {rank: tuple(c.digest for s in steps for c in found[rank][s]) for rank in over}
        who = max(agreement.sides(seen).values(), key=lambda side: (len(side), side))
        digests = {tuple(c.digest for c in found[who[0]][s]) for s in steps}
        if len(who) < 2 or len(digests) < 2 or (best and len(best.ranks) >= len(who)):
            continue
        firsts = [found[rank][steps[0]][0] for rank in who]
        parts = {(one.replicas, one.number) for one in firsts}
        same = len(parts) == 1 and firsts[0].replicas > 1
        numbers = {found[rank][steps[0]][0].number for rank in over}
        every = len(numbers) == firsts[0].replicas
        computed = ([losses[rank].get(step) for rank in who] for step in steps)
        alike = not any(agreement.apart(filter(None, row), _LOSS) for row in computed)
        best = SharedSamples(who, steps, firsts[0], same, every, alike, len(steps) == whole)
    return best
