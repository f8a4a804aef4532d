"""Learning rates of the ranks beside those of one process.

A rate that is another one on one rank is wrong, and so is one that is another one on all ranks,
unless programs scale it like that on purpose: by the number of ranks or its root, in the first
step. What a schedule counts is not known where several steps of one process are made one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Set

from moediag.protocol.measured import Measured
from moediag.protocol.tolerance import SAME_RATE

Rates = Mapping[int, Mapping[str, float]]  # rank -> parameter -> learning rate


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
