"""What a planned step costs: bytes and calls per axis, and memory per rank. Pure arithmetic.

The formulas are in docs/howto/check.md; :func:`as_recorded` holds them against recorded calls.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from moediag.evidence.model import Evidence
from moediag.protocol import PlannedParameter, PlannedUnit, Traffic
from moediag.records import dataclass

_EMBEDDING = ": embedding_rowwise"  # a rule of transformers' tensor parallel plans
_BLOCK = 256  # elements that share one float32 scale, of 8-bit states


@dataclass(frozen=True, slots=True)
class States:
    """What an optimizer keeps for each parameter."""

    words: str
    """``{dtype}`` stands for that of the states."""
    bytes: Callable[[PlannedParameter, int], float]
    """On the rank that holds most; the second argument: bytes of an element of the states."""
    copies: int = 0
    """Of one state, which its step makes and frees."""


def _moments(number: int) -> Callable[[PlannedParameter, int], float]:
    return lambda row, element: number * row.most * element


def _eight_bits(row: PlannedParameter, _: int) -> float:
    return 2 * (row.most + 4 * math.ceil(row.most / _BLOCK))


def _matrix(row: PlannedParameter) -> bool:
    return len(row.shape) > 1


def _muon(row: PlannedParameter, element: int) -> float:
    hidden = _matrix(row) and "*" in row.name
    return (1 if hidden else 2) * row.most * element


def _factors(row: PlannedParameter, element: int) -> float:
    """A row and a column of means for each matrix, and as many elements for a vector."""
    if not _matrix(row):
        return row.most * element
    *outer, rows, columns = row.shape
    return math.prod(outer) * (rows + columns) * element * row.most / math.prod(row.shape)


OPTIMIZERS = {
    # torch's foreach kernels take the root of all second moments at once.
    "adamw": States(
        "two moments in {dtype}, and a copy of one while it steps (foreach, torch's default)",
        _moments(2),
        copies=1,
    ),
    "adamw-fused": States("two moments in {dtype}", _moments(2)),
    "adamw-8bit": States(
        f"two moments of 8 bits, with a float32 scale for each {_BLOCK} elements", _eight_bits
    ),
    "sgd": States("no state (no momentum)", _moments(0)),
    "muon": States(
        "one moment in {dtype} for matrices of layers, AdamW's two for the rest",
        _muon,
    ),
    "adafactor": States("means of rows and of columns, in {dtype}", _factors),
    "none": States("no state", _moments(0)),
}
_MASTER = 4  # bytes of an element of a float32 copy, whose states are float32 too


@dataclass(frozen=True, slots=True)
class AxisCost:
    """FSDP2's calls in one step of one rank, on one mesh axis."""

    axis: str
    ranks: int
    all_gathers: int
    gathered: int
    """Bytes of the gathered tensors together, padding included."""
    reduce_scatters: int
    reduced: int
    """Bytes of the tensors that are reduced together, padding included."""
    all_reduces: int
    """Of the replicas' gradients."""
    padding: int
    """Bytes of ``gathered`` that are padding."""
    replicas: int = 1
    """Ranks that hold the same shard."""
    all_reduced: int = 0
    """Bytes of the shards whose gradients the replicas reduce."""

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step: by a ring, (n - 1) / n of each tensor."""
        return (self.gathered + self.reduced) * (self.ranks - 1) // self.ranks

    @property
    def sent_to_replicas(self) -> int:
        """Bytes that a rank sends in a step to reduce over the replicas: by a ring, 2 (r - 1) / r
        of each shard."""
        return 2 * self.all_reduced * (self.replicas - 1) // self.replicas


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What one rank can send, in GB/s."""

    inside: float
    """To ranks of its node."""
    between: float
    """To ranks of other nodes."""
    per_node: int = 8
    """Ranks of a node."""
    step: float | None = None
    """Seconds of a step, if the user knows them."""


@dataclass(frozen=True, slots=True)
class Wire:
    """Communication time of the calls of one axis in a step."""

    axis: str
    bytes: int
    """Sent by a rank."""
    gbps: float
    """GB/s of the slowest link of its ring."""
    between: bool
    """The ring crosses nodes."""
    seconds: float
    share: float | None
    """Of the step; None: its time was not given."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the rank that holds most."""

    parameters: int
    gradients: int
    optimizer: int
    largest_gather: int
    largest_unit: str
    """Of those that are freed after their forward."""
    resident: int = 0
    """Gathered bytes of units that stay gathered until their backward ends, such as the root."""
    step: int = 0
    """What the optimizer's step makes and frees."""

    @property
    def total(self) -> int:
        gathered = self.resident + self.largest_gather
        return self.parameters + self.gradients + self.optimizer + gathered


def by_axis(units: Iterable[PlannedUnit]) -> tuple[AxisCost, ...]:
    """Returns the costs of each mesh axis over which FSDP2 shards."""
    found: dict[tuple[str, int], list[PlannedUnit]] = defaultdict(list)
    for unit in units:
        found[unit.axis, unit.shards].append(unit)
    return tuple(_axis(axis, ranks, own) for (axis, ranks), own in found.items())


def _axis(axis: str, ranks: int, units: Sequence[PlannedUnit]) -> AxisCost:
    some = [unit for unit in units if unit.parameters]
    return AxisCost(
        axis,
        ranks,
        all_gathers=sum(u.count * u.gathers for u in some),
        gathered=sum(u.count * u.gathers * u.gathered * u.element for u in some),
        reduce_scatters=sum(u.count for u in some),
        reduced=sum(u.count * u.gathered * _reduced(u) for u in some),
        all_reduces=sum(u.count for u in some if u.replicas > 1),
        padding=sum(u.count * u.gathers * (u.gathered - u.elements) * u.element for u in some),
        replicas=max((u.replicas for u in some), default=1),
        all_reduced=sum(
            u.count * u.gathered * _reduced(u) // u.shards for u in some if u.replicas > 1
        ),
    )


def _reduced(unit: PlannedUnit) -> int:
    return unit.reduced_element or unit.element


def wires(
    costs: Iterable[AxisCost], layout: Mapping[str, int], ranks: int, bandwidth: Bandwidth
) -> tuple[Wire, ...]:
    """Returns the time of each axis: bytes that a rank sends / bandwidth. A ring is as slow as its
    slowest link. ``layout``: outermost axis first."""
    found = []
    for cost in costs:
        inner = _inner(cost.axis, layout)
        near = ranks <= bandwidth.per_node or (
            inner is not None and cost.ranks * inner <= bandwidth.per_node
        )
        found.append(_wire(cost.axis, cost.sent, near, bandwidth))
        if cost.sent_to_replicas:
            near = ranks <= bandwidth.per_node
            found.append(_wire(f"{cost.axis} replicas", cost.sent_to_replicas, near, bandwidth))
    return tuple(wire for wire in found if wire.bytes)


def wires_of(traffic: Iterable[Traffic], bandwidth: Bandwidth) -> tuple[Wire, ...]:
    """Returns the time of each group whose calls were counted. ``bandwidth``: a group that ends on
    the first node crosses none."""
    return tuple(
        _wire(one.name, one.bytes, one.last < bandwidth.per_node, bandwidth) for one in traffic
    )


def _inner(axis: str, layout: Mapping[str, int]) -> int | None:
    """Returns the distance of neighbours on ``axis``; None for an axis that only the library
    knows."""
    names = list(layout)
    if axis not in names:
        return None
    return math.prod(layout[name] for name in names[names.index(axis) + 1 :])


def _wire(axis: str, sent: int, near: bool, bandwidth: Bandwidth) -> Wire:
    gbps = bandwidth.inside if near else bandwidth.between
    seconds = sent / gbps / 1e9
    share = seconds / bandwidth.step if bandwidth.step else None
    return Wire(axis, sent, gbps, not near, seconds, share)


def memory(
    plan: Iterable[PlannedParameter], units: Iterable[PlannedUnit], optimizer: str = "adamw",
    master: bool = False,
) -> Memory:  # fmt: skip
    plan = list(plan)
    states = OPTIMIZERS[optimizer]

    def element(row: PlannedParameter) -> int:
        return _MASTER if master else row.element

    kept = sum(states.bytes(row, element(row)) * row.count for row in plan)
    kept += sum(_MASTER * row.most * row.count for row in plan) if master else 0
    step = states.copies * sum(element(row) * row.most * row.count for row in plan)
    own = sum(row.most * row.count * row.element for row in plan)
    gradients = sum(_of_gradient(row) * row.count * row.element for row in plan)
    units = list(units)
    resident = sum(u.count * u.gathered * u.element for u in units if u.gathers == 1)
    freed = (unit for unit in units if unit.gathers > 1)
    largest = max(freed, key=lambda u: u.gathered * u.element, default=None)
    gather = largest.gathered * largest.element if largest is not None else 0
    module = largest.module if largest is not None else ""
    return Memory(own, gradients, round(kept), gather, module, resident, step)


def _of_gradient(row: PlannedParameter) -> int:
    """Returns its elements on the rank that holds most. Each rank keeps the whole gradient of an
    embedding whose rows a tensor parallel plan divides, unless FSDP2 divides it as well: measured
    on torch 2.13 and transformers 5.23.0."""
    if row.rule.endswith(_EMBEDDING) and len([s for s in row.slices if s.dim is not None]) == 1:
        return math.prod(row.shape)
    return row.most


@dataclass(frozen=True, slots=True)
class Recorded:
    """Calls of one operation on one mesh axis that carry parameters or their gradients."""

    calls: int = 0
    elements: int = 0
    """Of the whole tensors, gathered or to be reduced, together."""
    largest: int = 0
    """Elements of the largest."""


def recorded(evidence: Evidence, rank: int = 0) -> dict[tuple[str, str], Recorded]:
    """Returns what ``rank`` recorded in its last step, by mesh axis and operation: the first step
    may prepare something."""
    seen = evidence.ranks[rank]
    last = max((call.step for call in seen.collectives if call.parameters), default=0)
    found: dict[tuple[str, str], Recorded] = defaultdict(Recorded)
    for call in seen.collectives:
        group = seen.groups.get(call.group)
        if call.step != last or call.parameters is None or group is None:
            continue
        size = call.numel_out if call.op == "all_gather" else call.numel_in
        before = found[group.axis or "", call.op]
        found[group.axis or "", call.op] = Recorded(
            before.calls + 1, before.elements + size, max(before.largest, size)
        )
    return dict(found)


def as_recorded(units: Iterable[PlannedUnit], evidence: Evidence, rank: int = 0) -> str:
    """Compares the formulas with the calls that ``rank`` recorded in its last step. Returns how
    they differ, "" if they agree."""
    units = list(units)
    expected = {cost.axis: cost for cost in by_axis(units)}
    seen = recorded(evidence, rank)
    element = {
        (unit.axis, op): size
        for unit in units
        for op, size in (("all_gather", unit.element), ("reduce_scatter", _reduced(unit)))
    }
    told = []
    for axis, cost in expected.items():
        for op, calls, size in (
            ("all_gather", cost.all_gathers, cost.gathered),
            ("reduce_scatter", cost.reduce_scatters, cost.reduced),
        ):
            found = seen.get((axis, op), Recorded())
            bytes_ = found.elements * element[axis, op]
            if cost.ranks > 1 and (found.calls != calls or bytes_ != size):
                told.append(
                    f"{op} on {axis}: {calls} calls with {size:,} bytes expected, {found.calls} "
                    f"with {bytes_:,} recorded"
                )
    return "; ".join(told)
