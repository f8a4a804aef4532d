"""Every fix proposed for the router under tensor parallelism, as the places where it differs.

A gradient that each rank has a part of must be summed exactly once in backward. The fields of
:class:`Plan` are the places where that can happen. The release itself sums the input gradients of
the experts and the shared experts, and nothing of the gate's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict


@dataclass(frozen=True)
class Plan:
    """Where gradients are summed over the ranks."""

    gate_output: bool = False  # the gradient that enters the gate is summed
    gate_input: bool = True  # the gate's input gradient is summed inside
    routed_input: bool = True  # likewise for the routed experts (only if they are tensor parallel)
    shared_input: bool = True  # likewise for the shared experts
    boundary: bool = False  # the whole block's input gradient is treated as parts and summed once
    # the gradients of the routed experts' own shards are treated as parts of a sum
    weights: bool = False
    afterwards: str = ""  # the gate's finished gradient is all-reduced: "", mean or sum


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
    """A configuration of the block."""

    # the routed experts are cut along their hidden dimension; else each rank holds whole experts
    # and routes its own slice of the tokens
    tensor_parallel: bool
    scores_before: bool  # the routing scores scale the experts' input, else their output
