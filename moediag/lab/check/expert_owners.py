"""Which rank holds which experts, by arithmetic from the placements."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from moediag.lab.check import placed
from moediag.lab.check.tensor_places import divided, listed
from moediag.lab.step.models.plan_names import generic
from moediag.protocol import FAILS, CheckFinding, ExpertRange
from moediag.recorder.step import pieces

OWNERSHIP = "ownership"
Named = Sequence[Tuple[str, Any]]  # parameters with their names


def owners(
    model: Any, experts: int, parameters: Named, ways: int
) -> Tuple[List[ExpertRange], List[CheckFinding]]:
    """Returns who holds which experts, for parameters with all experts of a block, and what is
    wrong with it."""
    groups: Dict[Any, List[Tuple[str, Any]]] = {}
    for name, parameter in parameters:
        if routed(name, experts) and parameter.dim() == 3:
            key = (parameter.shape[0], pieces.axes_of(parameter))
            groups.setdefault(key, []).append((name, parameter))
    found: List[ExpertRange] = []
    wrong: List[CheckFinding] = []
    for (rows, _), members in groups.items():
        names = sorted({generic(name) for name, _ in members})
        found.append(_owner(names, members[0][1], rows))
        wrong += _dispatched(model, names, members[0][0], rows, ways)
    return found, wrong


def routed(name: str, experts: int) -> bool:
    """Whether a parameter belongs to routed experts."""
    return experts > 0 and ".experts." in f".{name}"


def _dispatched(
    model: Any, names: List[str], name: str, experts: int, ways: int
) -> Iterator[CheckFinding]:
    """Compares the experts that a rank of the ep axis holds with those that tokens are sent to it
    for: ``num_experts`` of its module, in rank order."""
    local = getattr(model.get_submodule(name.rpartition(".")[0]), "num_experts", None)
    if ways > 1 and isinstance(local, int) and local * ways != experts:
        yield CheckFinding(
            OWNERSHIP, FAILS,
            f"{listed(names)}: tokens are sent for {local} experts to each of {ways} ranks, which "
            f"is not {experts} in all",
        )  # fmt: skip


def _owner(names: List[str], parameter: Any, experts: int) -> ExpertRange:
    sizes = [axis.size for axis in pieces.axes_of(parameter)]
    rows = [one for one in divided(parameter) if one[1] == 0]
    # Replicas, and ranks that hold another part of the same rows. The pieces of the other axes
    # are those of torch.chunk, so together they hold each expert once.
    copies = math.prod([n for axis, n in enumerate(sizes) if axis not in {one[0] for one in rows}])
    found = placed.by_coordinate(experts, sizes, rows)
    return ExpertRange(names, experts, copies, [(r.start, r.stop) for r in found.values()])
