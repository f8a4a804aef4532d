"""Whether the measurements of two runs can be compared: same tensors, same samples, no random
numbers, a reference that gives the same result twice. If not, why, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, List, Mapping, Optional, Sequence

import torch

from moediag.protocol.measured import IN_TURN
from moediag.ranks.verify import noise, samples
from moediag.ranks.verify.runs import Alone, Run
from moediag.ranks.verify.tensor_files import Tensors

_SHOWN = 3
_SAMPLES = (
    "Let one process see in each step what all ranks see together: the batch size times the number "
    "of data-parallel ranks, the same sampler and seed, and one data loader worker or none."
)
_OWN_PART = "Give each data-parallel rank its own part of the samples, as DistributedSampler does."
_DROPOUT = "Set dropout (and other random layers) to 0 in both commands."


@dataclass(frozen=True)
class Incomparable:
    """Why nothing can be compared."""

    reason: str
    what_to_do: str = ""
    failure: bool = False  # the reason is itself one


def before(job: Run, runs: Sequence[Run]) -> Optional[Incomparable]:
    """What the answers alone show. ``runs``: those of the reference, the first one first."""
    for who, run in (("the distributed run", job), ("the reference", runs[0])):
        if not run.ranks:
            return Incomparable(f"{who} took no optimizer step that moediag could see")
        missing = sorted(set(range(_world(run))) - set(run.ranks))
        if missing:
            return Incomparable(f"{who}: ranks {', '.join(map(str, missing))} measured nothing")
        problems = _first(p for one in run.ranks.values() for p in one.problems)
        if problems:
            return Incomparable(f"{who}: {problems}")
        if not run.steps:
            return Incomparable(f"{who} took no optimizer step")
    if _world(runs[0]) != 1:
        return Incomparable(
            f"the reference ran as {_world(runs[0])} ranks",
            "--reference must be a command that trains in one process.",
        )
    for run in runs[1:]:
        problems = _first(p for one in run.ranks.values() for p in one.problems)
        if not run.steps or problems:
            why = problems or "it took no optimizer step then"
            return Incomparable(f"the reference could not be run a second time: {why}")
    normalises = _first(one.across_samples for one in job.ranks.values() if one.across_samples)
    alone = next(iter(runs[0].ranks.values()))
    # A reference that is given the batches of the ranks one after the other does the same.
    if normalises and _world(job) > 1 and alone.replayed != IN_TURN:
        return Incomparable(
            f"the model has {normalises}, which normalises over the samples of one rank: with all "
            "samples in one process its result differs, without any error",
            "Use SyncBatchNorm in the distributed run, or another normalisation.",
        )
    if any(one.random for run in (job, runs[0]) for one in run.ranks.values()):
        return Incomparable(
            "the model draws random numbers in its forward (dropout, noise in a router), so two "
            "runs cannot give the same gradients",
            _DROPOUT,
        )
    return _samples(job, runs)


def _world(run: Run) -> int:
    return max((one.world_size for one in run.ranks.values()), default=0)


def _samples(job: Run, runs: Sequence[Run]) -> Optional[Incomparable]:
    single = [step.samples for step in runs[0].ranks[0].steps]
    for run in runs[1:]:
        other = [step.samples for step in run.ranks[0].steps]
        if other[:1] != single[:1]:
            return Incomparable(
                "the reference saw different samples when it ran again with the same command",
                "Set the seed of its data.",
            )
    ranks = {rank: one.steps for rank, one in job.ranks.items()}
    if not any(steps[0].samples for steps in ranks.values()):
        return Incomparable(
            "no call of the model was seen in the distributed run's first step, so it is not known "
            "what it was trained on",
            "Call the model that was given (or wrapped), not another copy of it.",
        )
    if not single[0]:
        return Incomparable(
            "the model is called without tensors that could be compared, so it is not known "
            "whether both runs saw the same samples"
        )
    if samples.steps_alike(ranks, runs[0].ranks[0].steps) == 0:
        of_first = {rank: steps[0].samples for rank, steps in ranks.items()}
        over = next((one.averages_over for one in job.ranks.values()), [])
        repeated = samples.repeated(of_first, single[0], over)
        if repeated:
            return Incomparable(repeated, _OWN_PART, failure=True)
        return Incomparable(samples.sentence(of_first, single[0], 1), _SAMPLES)
    return None


def comparable_steps(job: Run, runs: Sequence[Run]) -> int:
    """Returns the number of first steps with the same samples in all runs."""
    single = [step.samples for step in runs[0].ranks[0].steps]
    ranks = {rank: one.steps for rank, one in job.ranks.items()}
    alike = samples.steps_alike(ranks, runs[0].ranks[0].steps)
    for run in runs[1:]:
        other = [step.samples for step in run.ranks[0].steps]
        same = [a == b for a, b in zip(single, other)]  # noqa: B905 - Python 3.9
        alike = min(alike, (same + [False]).index(False))
    return alike


def after(
    names: Iterable[str], alone: Alone, again: Alone, rounded: Alone, dtypes: List[str]
) -> Optional[Incomparable]:
    """What the tensors of the first step show. ``names``: all that the ranks hold."""
    every = set(names)
    missing = sorted(every - set(alone.start))
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        return Incomparable(
            f"the reference has no {', '.join(missing[:_SHOWN])}{more}",
            "Both commands must build the same model.",
        )
    repeated = noise.disagreement(alone.gradients[0], again.gradients[0])
    if not repeated <= noise.REPEATS:
        return Incomparable(
            f"the reference is not deterministic: its gradients differ by {repeated:.0%} when the "
            "same command runs again with the same weights and samples",
            "Make it deterministic (seeds, torch.use_deterministic_algorithms).",
        )
    rounding = noise.disagreement(alone.gradients[0], rounded.gradients[0])
    if not rounding <= noise.MOST:
        return Incomparable(
            f"rounding alone changes the gradients of this model by {rounding:.0%} "
            f"({', '.join(dtypes)})",
            "Use float32 in both commands.",
        )
    return None


def tied_apart(
    starts: Mapping[int, Tensors], alone: Alone, tied: Mapping[str, str]
) -> Optional[Incomparable]:
    """Whether a rank began with other values of a parameter that one process holds under two names.
    A stage of a pipeline holds it under one of them."""
    for rank, start in starts.items():
        for other, name in tied.items():
            own, whole = start.get(other), alone.start.get(name)
            if own is None or own.tensor is None or whole is None:
                continue
            part = own.where.cut(whole, tuple(own.tensor.shape))
            if not torch.equal(own.tensor, part):
                return Incomparable(
                    f"{other} on rank {rank} did not begin with the values of {name}, though in "
                    "one process they are one parameter",
                    "Give both the same values before the first step.",
                )
    return None


def _first(texts: Iterable[str]) -> str:
    return next(iter(texts), "")
