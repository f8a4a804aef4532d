"""Every fix proposed for the router under tensor parallelism, as the places where it differs.

A gradient that each rank has a part of must be summed exactly once on its way down. The places
where that can happen are the fields of :class:`Plan`; the release itself sums what the experts and
the shared experts hand down, and nothing of what the gate gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict


@dataclass(frozen=True)
class Plan:
    """``gate_output``: the gradient that enters the gate is summed over the ranks. ``gate_input``:
    what the gate hands down is summed inside. ``routed_input``, ``shared_input``: likewise for the
    routed experts (only where they are tensor parallel) and the shared ones. ``boundary``: what
    the whole block hands down is taken for parts and summed once. ``weights``: the gradients of
    the routed experts' own shards are taken for parts of a sum. ``afterwards``: the gate's finished
    gradient is all-reduced: "", mean or sum."""

    gate_output: bool = False
    gate_input: bool = True
    routed_input: bool = True
    shared_input: bool = True
    boundary: bool = False
    weights: bool = False
    afterwards: str = ""


# Option `fix` of the program: weights-partial is torchtitan #2388, gate-partial the proposal of
# #2387. merged is #2416 as its code reads in torchtitan's history: the gate's input still becomes a
# DTensor whose gradient is summed (NoParallel calls from_local without grad_placements).
FIXES: Dict[str, Plan] = {
    "none": Plan(),
    "weights-partial": Plan(weights=True),
    "gate-partial": Plan(gate_output=True),
    "gate-mean": Plan(afterwards="mean"),
    "gate-sum": Plan(afterwards="sum"),
    "boundary-twice": Plan(boundary=True, gate_output=True),
    "merged": Plan(boundary=True, gate_output=True, routed_input=False, shared_input=False),
    "boundary": Plan(
        boundary=True, gate_output=True, routed_input=False, shared_input=False, gate_input=False
    ),
}


@dataclass(frozen=True)
class Cell:
    """``tensor_parallel``: the routed experts are cut along their hidden dimension; else each rank
    holds whole experts and routes its own slice of the tokens. ``scores_before``: the routing
    scores scale what goes into the experts, else what comes out."""

    tensor_parallel: bool
    scores_before: bool
