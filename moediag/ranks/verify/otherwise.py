"""Parameters that the distributed run does not train as one process does: before any number is
compared, as the models and the optimizers say it. With the learning rates of both runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Set

from moediag.protocol import MeasuredStep
from moediag.protocol.measured import Measured
from moediag.protocol.outcome import FROZEN, LEFT_OUT, THAWED
from moediag.protocol.tolerance import SAME_RATE
from moediag.ranks.verify.runs import Alone, Run
from moediag.ranks.verify.tensor_files import Tensors

_HOW = (FROZEN, THAWED, LEFT_OUT)
Rates = Mapping[int, Mapping[str, float]]  # rank -> parameter -> learning rate


class Otherwise:
    """What the first step says; ``starts``: the parts of each rank before it."""

    def __init__(self, job: Run, reference: Run, alone: Alone, starts: Dict[int, Tensors]) -> None:
        self._alone = alone
        self._single = _under_all_names(reference)
        self._starts = starts
        ranks = job.ranks.values()
        # An optimizer with parameters of no model may update copies of the others.
        self._foreign = any(one.foreign for one in ranks)
        self._updated = {name for one in ranks for step in one.steps for name in step.rates}

    def of_rank(self, rank: int) -> Dict[str, List[str]]:
        """Returns the parameters by how this rank trains them otherwise."""
        found: Dict[str, List[str]] = {how: [] for how in _HOW}
        for name, stored in self._starts[rank].items():
            trains = self._single.get(name)
            if stored.buffer or trains is None or not stored.where.shape:
                continue
            if trains != stored.trainable:
                found[FROZEN if trains else THAWED].append(name)
            elif trains and self._left_out(name):
                found[LEFT_OUT].append(name)
        return {how: names for how, names in found.items() if names}

    def _left_out(self, name: str) -> bool:
        weights = self._alone.weights[0]
        return not self._foreign and name not in self._updated and name in weights

    def learns(self, name: str) -> bool:
        """Whether one process has a gradient of it that is not zero."""
        gradient = self._alone.gradients[0].get(name)
        return gradient is not None and bool(gradient.any())


def _under_all_names(reference: Run) -> Dict[str, bool]:
    own = {n: one.trainable for n, one in reference.start(0).items() if not one.buffer}
    tied = reference.ranks[0].tied
    return {**own, **{other: own[name] for other, name in tied.items() if name in own}}


def counts(
    ranks: Mapping[int, MeasuredStep], alone: MeasuredStep
) -> Dict[int, tuple[float, float]]:
    """Returns by rank how many updates its optimizer has counted, and how many that of one process
    has, where these differ by the same number for all parameters of all ranks."""
    apart: Set[float] = {
        count - alone.updates[name]
        for step in ranks.values()
        for name, count in step.updates.items()
        if name in alone.updates
    }
    if len(apart) != 1 or apart == {0.0}:
        return {}
    found = {}
    for rank, step in ranks.items():
        for name, count in step.updates.items():
            if name in alone.updates:
                found[rank] = count, alone.updates[name]
                break
    return found


@dataclass(frozen=True)
class RatesOfStep:
    """What one step shows."""

    # By rank its rate and that of one process, where it is wrong.
    wrong: Dict[int, Optional[List[float]]]
    # Parameters with another rate on all ranks: their weights are not compared.
    other: Set[str] = field(default_factory=set)
    not_seen: List[str] = field(default_factory=list)


class LearningRates:
    """Compares step after step, in order."""

    def __init__(self, reference: Measured) -> None:
        self._reference = reference
        self._scaled: Set[str] = set()  # parameters, in the first step

    def step(self, number: int, ranks: Rates) -> RatesOfStep:
        found = RatesOfStep(_apart(ranks, self._reference.steps[number - 1].rates))
        everywhere = None
        for name, right in self._reference.steps[number - 1].rates.items():
            own = {rates[name] for rates in ranks.values() if name in rates}
            rate = own.pop() if len(own) == 1 else right
            if abs(rate - right) <= SAME_RATE * abs(right):
                continue
            found.other.add(name)
            if self._on_purpose(name, number, len(ranks), rate / right if right else 0.0):
                self._scaled.add(name)
                found.not_seen.append(
                    f"weights after step {number}: the learning rate is {rate:.6g} on every rank "
                    f"and {right:.6g} in the reference"
                )
            else:
                everywhere = everywhere or [rate, right]
        wrong = {rank: one or everywhere for rank, one in found.wrong.items()}
        return RatesOfStep(wrong, found.other, found.not_seen)

    def _on_purpose(self, name: str, number: int, world: int, times: float) -> bool:
        if self._reference.merged > 1:
            return True
        usual = (world, world**0.5, 1 / world, world**-0.5)
        near = any(abs(times - one) <= SAME_RATE * one for one in usual)
        return near and (number == 1 or name in self._scaled)


def _apart(ranks: Rates, alone: Mapping[str, float]) -> Dict[int, Optional[List[float]]]:
    """Returns by rank its rate and that of one process where ranks differ from each other: by a
    parameter for which this rank differs from one process, else None."""
    found: Dict[int, Optional[List[float]]] = dict.fromkeys(ranks)
    for name, right in alone.items():
        own = {rank: rates[name] for rank, rates in ranks.items() if name in rates}
        if len(set(own.values())) < 2:
            continue
        for rank, rate in own.items():
            if found[rank] is None:
                found[rank] = [rate, right]
    return found
