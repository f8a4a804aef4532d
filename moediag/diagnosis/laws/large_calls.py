"""Which calls are large enough to carry gradients or parameters of a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator

from moediag.diagnosis.schedules.align import lost_prefix
from moediag.evidence.law_model import PLAIN
from moediag.evidence.model import Collective, Evidence, RankEvidence, recorded

_ADDS = ("all_reduce", "reduce")
_COLLECTS = (*_ADDS, "all_gather", "gather")
_INSIDE = ("forward", "backward")
_MANY = 64  # elements that are no numbers for a log
_PART = 1 << 20  # elements that a program may send at once of more


def elements(shape: str) -> int:
    """Of a tensor whose shape is ``4x3``."""
    return math.prod(map(int, shape.split("x")))


def _matrices(seen: RankEvidence) -> list[int]:
    """Elements of each matrix of the rank's models."""
    shapes = ([p.shape for p in one.pieces] for one in (seen.laws.checks if seen.laws else ()))
    matrices = ([elements(shape) for shape in of if "x" in shape] for of in shapes)
    return next(filter(None, matrices), [])


def least_matrix(evidence: Evidence) -> int:
    """Elements of the smallest matrix of the models."""
    return min((n for seen in evidence.ranks.values() for n in _matrices(seen)), default=0)


def large_calls(evidence: Evidence) -> list[Collective]:
    """Calls that are large enough to carry a matrix of the model; of bytes, all of its matrices:
    pickled objects, which carry metrics, too."""
    least = least_matrix(evidence)
    return [
        call
        for seen in evidence.ranks.values()
        for whole in [sum(_matrices(seen))]
        for call in seen.collectives
        if ("float" in call.dtype and max(call.numel_in, call.numel_out) >= least)
        or ("int8" in call.dtype and call.numel_in >= whole > 0)
    ]


def all_calls_small(evidence: Evidence) -> bool:
    """Whether no call between the first and the last step could carry a matrix, and no call was
    lost."""
    last = _last_step(evidence)
    small = not any(1 < call.step < last for call in large_calls(evidence))
    return small and not any(map(lost_prefix, evidence.ranks.values()))


def sends_nothing(evidence: Evidence) -> bool:
    """Whether no call outside the model could carry a matrix after the first step until all ranks
    ended: activations, and gradients of some updates, keep no parameters equal."""
    calls = (call for call in large_calls(evidence) if call.phase not in _INSIDE)
    later = any(call.step > 1 for call in calls)
    ended = all(seen.finished for seen in evidence.ranks.values())
    return ended and not later and not any(map(lost_prefix, evidence.ranks.values()))


def stages(evidence: Evidence) -> frozenset[tuple[int, int]]:
    """The ranks and steps in which one sends floats to another or receives them, as stages of a
    pipeline do."""
    return frozenset(
        (rank, call.step)
        for rank, seen in evidence.ranks.items()
        for call in seen.collectives
        if call.peer is not None and "float" in call.dtype
        and max(call.numel_in, call.numel_out) >= _MANY
    )  # fmt: skip


def exchanges(evidence: Evidence) -> bool:
    """Whether each rank sent its samples to others in the forward, or gradients of these in the
    backward: to experts or tables of their own."""
    return all(
        any(call.op == "all_to_all" and call.phase in _INSIDE for call in seen.collectives)
        for seen in evidence.ranks.values()
    )


def adds_inside(evidence: Evidence) -> bool:
    """Whether ranks added up activations in the forward, or their gradients in the backward without
    a wrapper: statistics are smaller."""
    hows = {piece.how for own in recorded(evidence).values() for piece in own.pieces}
    phases = _INSIDE if hows == {PLAIN} else _INSIDE[:1]
    steps = {c.step for c in large_calls(evidence) if c.phase in phases and c.op in _ADDS}
    return len(steps) > 1


def meets_in_forward(evidence: Evidence) -> bool:
    """Whether ranks communicate in the forward, as those that split a sample between them do. DDP
    only broadcasts buffers there."""
    return any(_meetings(evidence))


def splits_samples(evidence: Evidence) -> bool:
    """Whether ranks exchange activations in the forward, as those do that have parts of the same
    samples."""
    return any(not call.parameters for call in _meetings(evidence))


def _meetings(evidence: Evidence) -> Iterator[Collective]:
    calls = (call for seen in evidence.ranks.values() for call in seen.collectives)
    return (call for call in calls if call.phase == "forward" and call.op != "broadcast")


def divides_inside(evidence: Evidence) -> bool:
    """Whether each rank gathered activations and added others up in the forward of several steps,
    as those that have parts of the classes of one head do."""
    return all(
        len({c.step for c in seen.collectives if c.op == op and _of_activations(c)}) > 1
        for seen in evidence.ranks.values()
        for op in ("all_gather", "all_reduce")
    )


def _of_activations(call: Collective) -> bool:
    return call.phase == "forward" and "float" in call.dtype and not call.parameters


def averaged(evidence: Evidence) -> bool:
    """Whether ranks made such a call outside the model, between the first and the last step: the
    program may average parameters or gradients itself. One in the forward has statistics or
    buffers, and one after the last update may only compare them, unless it adds up or collects
    whole models."""
    last = _last_step(evidence)
    calls = (call for call in large_calls(evidence) if call.phase not in _INSIDE)
    return any(1 < call.step < last for call in calls) or all(
        sum(
            call.numel_in
            for call in seen.collectives
            if call.op in _COLLECTS and call.step >= last and call.phase not in _INSIDE
        )
        >= sum(_matrices(seen))
        > 0
        for seen in evidence.ranks.values()
    )


def carried(evidence: Evidence, names: Collection[str]) -> bool:
    """Whether a call outside the model after the first step could carry the largest of these
    parameters, or a part of it; True without matrices among them. Smaller ones have samples."""
    pieces = (piece for own in recorded(evidence).values() for piece in own.pieces)
    sizes = [elements(p.shape) for p in pieces if p.name in names and "x" in p.shape]
    least = min(max(sizes, default=0), _PART)
    calls = (c for c in large_calls(evidence) if c.step > 1 and c.phase not in _INSIDE)
    return any(max(call.numel_in, call.numel_out) >= least for call in calls)


def adds_gradients(evidence: Evidence, names: Collection[str]) -> bool:
    """Whether all ranks add up as many numbers as these parameters have together, or a multiple, in
    the backward of each checked step."""
    pieces = (piece for own in recorded(evidence).values() for piece in own.pieces)
    shapes = {piece.name: piece.shape or "1" for piece in pieces if piece.name in names}
    size, added = sum(map(elements, shapes.values())), Counter[tuple[int, int]]()
    for rank, seen in evidence.ranks.items():
        whole = {key for key, of in seen.groups.items() if len(of.ranks) == evidence.world_size}
        for call in seen.collectives:
            if call.group in whole and call.op == "all_reduce" and call.phase == "backward":
                added[rank, call.step] += call.numel_in
    steps = {(rank, one.step) for rank, own in recorded(evidence).items() for one in own.checks}
    return size > 0 and all(added[one] and added[one] % size == 0 for one in steps)


def _last_step(evidence: Evidence) -> int:
    steps = [check.step for own in recorded(evidence).values() for check in own.checks]
    return max((*steps, *(seen.last_step for seen in evidence.ranks.values())), default=0)
