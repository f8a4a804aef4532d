"""Compares the measurements of a distributed run with those of one process, rank by rank.

The result is an outcome for each rank, as a rank of a scenario leaves it, so the same rules judge
it.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Tuple

import torch

from moediag.protocol import Applied, GradientError, Outcome, StepReplicas
from moediag.protocol.names import is_router
from moediag.protocol.outcome import (
    ABSENT,
    AFTER,
    FROZEN,
    LEFT_OUT,
    NOT_SENT,
    WrongModule,
)
from moediag.protocol.tolerance import SMALLEST, TRUE_NORM
from moediag.ranks.verify import noise, slices, updates
from moediag.ranks.verify.comparability import (
    Incomparable,
    after,
    before,
    comparable_steps,
    tied_apart,
)
from moediag.ranks.verify.first_wrong import FirstWrong
from moediag.ranks.verify.module_calls import Calls
from moediag.ranks.verify.not_reduced import not_reduced, not_sent
from moediag.ranks.verify.otherwise import LearningRates, Otherwise, counts
from moediag.ranks.verify.runs import Alone, Run
from moediag.ranks.verify.tensor_files import Stored, Tensors
from moediag.recorder.step.pieces import WHOLE, Where
from moediag.recorder.step.tensor_error import Tolerance, largest

_EXPERT = re.compile(r"experts?\.")
_MULTIPLE = 0.2  # residual of a multiple of the reference in less than float32, relative
_TURNED = 0.05  # of a gradient's L2 norm: not a multiple of the reference
LABELS = (
    "labels and other values that the model is not called with (whether both runs had the same)"
)


def compare(job: Path, references: List[Path], target: Path) -> None:
    """Writes an outcome of each rank of ``job`` into ``target``. ``references``: runs of one
    process, the third from weights changed by rounding."""
    runs = [Run.read(folder) for folder in references]
    for outcome in outcomes(Run.read(job), runs):
        outcome.write(target)


def outcomes(job: Run, runs: List[Run]) -> List[Outcome]:
    """Returns the outcome of each rank."""
    found = before(job, runs)
    if found is not None:
        return _incomparable(job, found)
    alone, again, rounded = (Alone.of(run) for run in runs)
    job = job.named_as(runs[0].ranks[0])
    job, ambiguous = _placed(job, runs[0].ranks[0].by_bytes, alone)
    starts = {rank: job.start(rank) for rank in job.ranks}
    names = {n for start in starts.values() for n, stored in start.items() if not stored.buffer}
    dtypes = sorted({*job.dtypes, *runs[0].dtypes})
    found = after(names, alone, again, rounded, dtypes) or tied_apart(
        starts, alone, runs[0].ranks[0].tied
    )
    if found is not None:
        return _incomparable(job, found)
    steps = min(comparable_steps(job, runs), *(run.steps for run in (job, *runs)))
    otherwise = Otherwise(job, runs[0], alone, starts)
    comparison = _Comparison(job, runs[0], alone, rounded, starts, ambiguous, otherwise)
    for number in range(1, steps + 1):
        measured = noise.of_step(alone, again, rounded, number, dtypes)
        if not comparison.step(number, measured):
            break
    if any(one.auxiliary for one in job.ranks.values()) and comparison.turned():
        return _incomparable(job, _AUXILIARY)
    calls = _module_calls(job, runs) if comparison.began_wrong else None
    if runs[0].ranks[0].merged > 1 and comparison.turned():
        groups = [group for one in job.ranks.values() for group in one.gathers]
        if not all(calls is not None and calls.share(group) for group in groups):
            return _incomparable(job, _GATHERED)
    if noise.coarsest(dtypes) > noise.coarsest(["float32"]) and comparison.routed_otherwise():
        return _incomparable(job, _ROUTED_OTHERWISE)
    first_wrong = _first_wrong(job, runs, calls) if calls is not None else {}
    return comparison.results(dtypes, steps, first_wrong)


def _module_calls(job: Run, runs: List[Run]) -> Optional[FirstWrong]:
    """Returns the calls of modules in the first step of all runs; None if one has none."""
    read = {rank: Calls.read(job.folder, rank, job.name) for rank in job.ranks}
    calls = {rank: one for rank, one in read.items() if one is not None}
    alone, rounded = (Calls.read(run.folder, 0) for run in (runs[0], runs[2]))
    if alone is None or rounded is None or len(calls) < len(job.ranks):
        return None
    return FirstWrong(calls, alone, rounded)


def _first_wrong(job: Run, runs: List[Run], calls: FirstWrong) -> Dict[int, WrongModule]:
    """Returns by rank the first module that computes something wrong in the first step."""
    by_rank = {rank: calls.of_rank(rank) for rank in job.ranks}
    exact = not _rounded(runs[0].step(0, 1)["gradients"])
    return {
        rank: dataclasses.replace(one, rounded=_rounded(job.step(rank, 1)["gradients"]))
        if exact and one.what == AFTER
        else one
        for rank, one in by_rank.items()
        if one is not None
    }


def _rounded(gradients: Tensors) -> str:
    """The low precision that all values of float32 gradients have; "": they have more."""
    own = [one.tensor for one in gradients.values() if one.tensor is not None]
    own = [tensor for tensor in own if tensor.dtype == torch.float32 and bool(tensor.any())]
    for dtype in (torch.bfloat16, torch.float16):
        if own and all(torch.equal(tensor, tensor.to(dtype).float()) for tensor in own):
            return str(dtype).rpartition(".")[2]
    return ""


def _placed(job: Run, by_bytes: List[str], alone: Alone) -> Tuple[Run, List[str]]:
    """Returns the job with the places of parts that only their bytes locate, and the parameters
    whose bytes fit several places."""
    if not by_bytes:
        return job, []
    starts = {rank: job.start(rank) for rank in job.ranks}
    places: Dict[int, Dict[str, Optional[Where]]] = {rank: {} for rank in job.ranks}
    ambiguous = []
    for name in by_bytes:
        whole = alone.start[name]
        parts = {rank: start[name] for rank, start in starts.items() if name in start}
        found = slices.located(parts, whole)[0] if whole is not None else None
        if found is None:
            ambiguous.append(name)
        for rank in parts:
            places[rank][name] = found[rank].where if found is not None else None
    return dataclasses.replace(job, places=places), ambiguous


def _incomparable(job: Run, found: Incomparable) -> List[Outcome]:
    said = {"repeats" if found.failure else "incomparable": f"{found.reason}."}
    return [
        Outcome(rank, next_step=found.what_to_do, **said)  # type: ignore[arg-type]
        for rank in (list(job.ranks) or [0])
    ]


_AUXILIARY = Incomparable(
    "gradients differ, but the model adds an auxiliary loss over the samples of each forward: over "
    "all samples together it differs, without any error",
    "Set the auxiliary loss to 0 in both commands, and compare again.",
)
_GATHERED = Incomparable(
    "gradients differ, but ranks exchange values between a forward and its backward, and the "
    "reference makes one step of several: a loss over all ranks' samples is another one there",
    "Give a reference whose steps see the samples of all ranks in one batch.",
)
_ROUTED_OTHERWISE = Incomparable(
    "gradients differ by more than rounding does to them, but the model routes tokens and computes "
    "in less than float32: rounding sends single tokens to other experts",
    "Use float32 in both commands.",
)
_OBJECTIVE = (
    "Reduce over ranks, or switch off, terms of the loss over a rank's own samples (auxiliary "
    "losses, means over its tokens)."
)


class _Comparison:
    def __init__(
        self,
        job: Run,
        reference: Run,
        alone: Alone,
        rounded: Alone,
        starts: Dict[int, Tensors],
        ambiguous: List[str],
        otherwise: Otherwise,
    ) -> None:
        self._job = job
        self._otherwise = {rank: otherwise.of_rank(rank) for rank in job.ranks}
        if reference.ranks[0].absent:
            for one in self._otherwise.values():
                one[ABSENT] = list(reference.ranks[0].absent)
        self._learns = otherwise.learns
        self._reference = reference.ranks[0]
        self._alone = alone
        self._starts = starts
        self._updates = updates.Updates(alone, rounded)
        self._gradients: Dict[int, Dict[str, Dict[str, GradientError]]] = {r: {} for r in job.ranks}
        self._applied: Dict[int, Dict[str, Applied]] = {r: {} for r in job.ranks}
        self._not_seen: Dict[str, None] = {LABELS: None}
        for name in ambiguous:
            self._not_seen[f"{name}: its values fit several parts of the reference's tensor"] = None
        self.began_wrong = False  # a gradient of step 1 is wrong
        self._rates = LearningRates(reference.ranks[0])
        self._explained = False  # the weights differ because of a norm

    def step(self, number: int, measured: noise.Noise) -> bool:
        """Compares one step; returns whether the next one can be compared."""
        right = True
        expected = self._alone.gradients[number - 1]
        self._updates.step(number, measured)
        self._explained |= self._other_norm(number)
        single = self._reference.steps[number - 1]
        of_optimizers = {rank: o.steps[number - 1].rates for rank, o in self._job.ranks.items()}
        rates = self._rates.step(number, of_optimizers)
        self._not_seen.update(dict.fromkeys(rates.not_seen))
        of_ranks: Dict[int, Tensors] = {}
        counted = counts({r: o.steps[number - 1] for r, o in self._job.ranks.items()}, single)
        for rank in self._job.ranks:
            groups = self._job.step(rank, number)
            start, otherwise = self._starts[rank], self._otherwise[rank]
            frozen = {
                name: dataclasses.replace(start[name], tensor=None, trainable=True)
                for name in otherwise.get(FROZEN, ())
                if self._learns(name)
            }
            own_gradients = {**groups["gradients"], **frozen, **self._absent()}
            errors = _errors(own_gradients, expected, measured)
            of_ranks[rank] = own_gradients
            self._gradients[rank][str(number)] = errors
            weights: Dict[str, GradientError] = {}
            if self._explained:
                self._not_seen[f"weights after step {number}: the clipping norm differs"] = None
            elif self._clips_alone(number):
                self._not_seen[
                    f"weights after step {number}: the distributed run clips gradients and the "
                    "reference does not"
                ] = None
            elif self._alone.weights[number - 1]:
                unmoved = {name: start[name] for name in otherwise.get(LEFT_OUT, ())}
                own = {**groups["weights"], **unmoved}
                own = {n: s for n, s in own.items() if n not in rates.other}
                weights = self._updates.compare(number, start, own)
                if own and not weights:
                    self._not_seen[f"weights after step {number}: gradients are near rounding"] = (
                        None
                    )
            rate = rates.wrong[rank]
            self._applied[rank][str(number)] = Applied(
                weights,
                rate=rate[0] if rate else None,
                reference_rate=rate[1] if rate else None,
                updates=counted[rank][0] if rank in counted else None,
                reference_updates=counted[rank][1] if rank in counted else None,
            )
            right = right and rank not in counted
            wrong = any(e.wrong for e in (*errors.values(), *weights.values()))
            right = right and not wrong and not rates.other and not self._explained
        for rank, names in not_sent(
            {rank: by_step[str(number)] for rank, by_step in self._applied.items()}, of_optimizers
        ).items():
            self._otherwise[rank][NOT_SENT] = names
        self._told_unreduced(number, of_ranks, expected, measured)
        return right

    def _absent(self) -> Tensors:
        """Returns what no rank holds and one process trains: a missing gradient."""
        wholes = {name: self._alone.start[name] for name in self._reference.absent}
        return {
            name: Stored(Where(WHOLE, tuple(whole.shape)), None)
            for name, whole in wholes.items()
            if whole is not None and self._learns(name)
        }

    def _told_unreduced(
        self,
        number: int,
        of_ranks: Mapping[int, Tensors],
        expected: Mapping[str, Optional[torch.Tensor]],
        measured: noise.Noise,
    ) -> None:
        """Says of which wrong gradients the ranks' mean or sum is right."""
        wrong = {
            name
            for by_step in self._gradients.values()
            for name, error in by_step[str(number)].items()
            if error.wrong
        }
        self.began_wrong |= number == 1 and bool(wrong)
        if any(one.reduction for one in self._job.ranks.values()):
            return  # why is known
        for how, names in not_reduced(wrong, of_ranks, expected, measured).items():
            for otherwise in self._otherwise.values():
                otherwise.setdefault(how, []).extend(names)

    def turned(self) -> bool:
        """Whether a wrong gradient has another direction than the reference's."""
        every = (
            e for steps in self._gradients.values() for by in steps.values() for e in by.values()
        )
        return any(e.wrong and e.times is not None and e.times.residual > _TURNED for e in every)

    def _other_norm(self, number: int) -> bool:
        right = self._reference.steps[number - 1].norm
        own = [one.steps[number - 1].norm for one in self._job.ranks.values()]
        if right is None or any(norm is None for norm in own):
            return False
        return any(abs((norm or 0.0) - right) > TRUE_NORM.floor * right for norm in own)

    def _clips_alone(self, number: int) -> bool:
        own = [one.steps[number - 1].norm for one in self._job.ranks.values()]
        return self._reference.steps[number - 1].norm is None and any(n is not None for n in own)

    def routed_otherwise(self) -> bool:
        """Whether wrong numbers may come from tokens that rounding sends to other experts. They are
        no multiples of the reference."""
        names = {name for start in self._starts.values() for name in start}
        if not any(_EXPERT.search(name) or is_router(name) for name in names):
            return False
        by_step = (errors for steps in self._gradients.values() for errors in steps.values())
        wrong = [e for errors in by_step for e in errors.values() if e.wrong]
        applied = (one for steps in self._applied.values() for one in steps.values())
        moved = any(w.wrong for one in applied if one.rate is None for w in one.weights.values())
        return moved or any(e.times is None or e.times.residual > _MULTIPLE for e in wrong)

    def results(
        self, dtypes: List[str], steps: int, first_wrong: Mapping[int, WrongModule]
    ) -> List[Outcome]:
        compared = max((len(by_step) for by_step in self._gradients.values()), default=0)
        coarse = noise.coarsest(dtypes) > noise.coarsest(["float32"])
        dtype = "bfloat16" if coarse else "float32"
        single = self._reference.steps[:compared]
        norms = [step.norm for step in single]
        known = [norm for norm in norms if norm is not None]
        losses = _losses([step.losses for step in single])
        if compared < min(self._job.steps, len(self._reference.steps)) and compared == steps:
            self._not_seen[f"steps after step {compared}: the two runs saw different samples"] = (
                None
            )
        found = []
        for rank, one in self._job.ranks.items():
            mine = one.steps[:compared]
            own = _losses([step.losses for step in mine])
            both = own is not None and losses is not None
            found.append(
                Outcome(
                    rank,
                    gradients=self._gradients[rank],
                    losses=(own or []) if both else [],
                    reference_losses=(losses or []) if both else [],
                    gradient_norms=[step.norm for step in mine] if known else [],
                    reference_norms=known if len(known) == len(norms) else [],
                    replicas={"0": StepReplicas(dtype=dtype)},
                    steps_done=compared,
                    micro_batches=max(1, len(one.steps[0].losses)),
                    applied=self._applied[rank],
                    trained_otherwise={**self._otherwise[rank], **one.reduction},
                    first_wrong=first_wrong.get(rank),
                    next_step=_OBJECTIVE if self.turned() else "",
                    not_seen=list(
                        dict.fromkeys(
                            [*self._not_seen, *one.not_checked, *self._reference.not_checked]
                        )
                    ),
                )
            )
        return found


def _losses(by_step: List[List[float]]) -> Optional[List[float]]:
    """Returns one loss a step; None with several backwards, whose scaling is not known."""
    if any(len(losses) != 1 for losses in by_step):
        return None
    return [losses[0] for losses in by_step]


def _errors(
    own: Tensors, expected: Mapping[str, Optional[torch.Tensor]], measured: noise.Noise
) -> Dict[str, GradientError]:
    tolerance = Tolerance(0.0, SMALLEST.floor * largest(expected.values()))
    errors: Dict[str, GradientError] = {}
    for name, stored in own.items():
        if not stored.trainable:
            continue
        right = expected.get(name)
        if stored.tensor is not None and not stored.tensor.numel():
            continue
        scale = largest([right])
        part = None if right is None else _cut(stored, right)
        found = tolerance.judge(stored.tensor, part, scale, measured.allowed(name, scale))
        errors[name] = dataclasses.replace(found, placement=stored.placement)
    return errors


def _cut(stored: Stored, whole: torch.Tensor) -> torch.Tensor:
    local = stored.where.shape if stored.tensor is None else tuple(stored.tensor.shape)
    if stored.tensor is None and stored.where.kind != "whole":
        return whole.float()  # no gradient where the reference has one: all of it is missing
    return stored.where.cut(whole, local).float()
