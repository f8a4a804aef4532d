"""The first module that computes something wrong: in the forward the first output that one process
does not have, in the backward the first gradient of a module's input or output.

A rank has some rows of the reference's tensors (its samples), or a part of one dim (of the
sequence, of the features): rows and parts of the sequence are known by the samples, other parts are
found by their values.
Gradients of activations are compared up to the factor that the rank's own loss has.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from moediag.protocol.outcome import AFTER, GRADIENT, INPUT, LOSS, OUTPUT, PART, WrongModule
from moediag.protocol.tolerance import GRADIENT as TOLERANCE
from moediag.ranks.verify.module_calls import Call, Calls
from moediag.ranks.verify.noise import TIMES
from moediag.ranks.verify.slices import rows_of_part

_RIGHT, _MOVED, _PART, _WRONG, _UNKNOWN = "right", "moved", "part", "wrong", "unknown"
_MOST_SLICES = 4096  # of one tensor that are looked for by their values
_GIVEN, _OUTPUT, _OF_GIVEN, _OF_OUTPUT = range(4)  # values of a call: tensors, their gradients
_Key = Tuple[str, int, int]  # module, number of its call in a forward, value


class _Value(NamedTuple):
    call: Call
    what: int
    tensor: torch.Tensor

    @property
    def key(self) -> _Key:
        return self.call.name, self.call.number, self.what


class _Place(NamedTuple):
    """Where one process has a sample of a rank."""

    forward: int
    row: int
    part: Optional[torch.Tensor]  # the positions of the sequence that the rank has; None: all
    length: int  # of the sequence


class _Right(NamedTuple):
    """What one process has where a rank has a value."""

    # Of the same part of the sequence, one for each dim of its size; else ``whole``.
    parts: List[torch.Tensor]
    whole: torch.Tensor


def _forward(calls: Calls) -> Iterator[_Value]:
    for call in calls.calls:
        for what, tensor in ((_GIVEN, call.given), (_OUTPUT, call.output)):
            if tensor is not None:
                yield _Value(call, what, tensor)


def _backward(calls: Calls) -> Iterator[_Value]:
    for one in calls.gradients:
        if one.value is not None:
            what = _OF_OUTPUT if one.of_output else _OF_GIVEN
            yield _Value(calls.calls[one.call], what, one.value)


def _by_forward(calls: Calls) -> Dict[_Key, Dict[int, torch.Tensor]]:
    found: Dict[_Key, Dict[int, torch.Tensor]] = {}
    for value in (*_forward(calls), *_backward(calls)):
        found.setdefault(value.key, {}).setdefault(value.call.forward, value.tensor)
    return found


class FirstWrong:
    """Compares the calls of ranks with those of one process; ``rounded``: of one process whose
    weights were changed by rounding."""

    def __init__(self, job: Dict[int, Calls], alone: Calls, rounded: Calls) -> None:
        self._job = job
        self._alone = alone
        self._single, self._rounded = _by_forward(alone), _by_forward(rounded)
        self._ranks = {rank: _by_forward(calls) for rank, calls in job.items()}
        every = [value.key for value in (*_forward(alone), *_backward(alone))]
        self._order = {key: at for at, key in reversed(list(enumerate(every)))}
        self._kinds = {call.name: call.kind for call in alone.calls}
        self._last = {name for name in self._kinds if _inside(alone.calls[-1].name, name)}
        self._last |= {value.call.name for value in [*_backward(alone)][:1]}
        self._row: Dict[str, Optional[_Place]] = {}  # by sample
        for forward, rows in enumerate(alone.rows):
            for at, row in enumerate(rows):
                self._row[row] = None if row in self._row else _Place(forward, at, None, 0)
        self._places = {
            rank: [self._located(calls, forward) for forward in range(len(calls.rows))]
            for rank, calls in job.items()
        }

    def _located(self, calls: Calls, forward: int) -> List[_Place]:
        """Returns where the samples of a forward are; [] if that is not known of one."""
        samples, found = calls.samples[forward], []
        for at, row in enumerate(calls.rows[forward]):
            known = self._row.get(row)
            if known is None and row not in self._row and samples is not None:
                known = self._part(samples[at])
            if known is None:
                return []
            found.append(known)
        return found

    def _part(self, sample: torch.Tensor) -> Optional[_Place]:
        """Returns the one sample of which this is a part."""
        found = [
            _Place(forward, row, part, len(whole))
            for forward, samples in enumerate(self._alone.samples)
            for row, whole in enumerate(samples if samples is not None else ())
            if sample.dim() and whole.dim() and (part := rows_of_part(sample, whole)) is not None
        ]
        return found[0] if len(found) == 1 else None

    def share(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks have the same samples, or parts of the same ones."""
        own = [[one[:2] for places in self._places[rank] for one in places] for rank in ranks]
        known = all(places for rank in ranks for places in self._places[rank])
        return known and all(one and sorted(one) == sorted(own[0]) for one in own)

    def of_rank(self, rank: int) -> Optional[WrongModule]:
        """Returns the first wrong module of this rank, or that all is right; None if nothing could
        be compared."""
        compared = 0
        inputs: Dict[Tuple[str, int, int], str] = {}
        moved: List[str] = []
        for value in self._comparable(rank, _forward(self._job[rank])):
            call = value.call
            status = self._status(rank, value)
            at = (call.name, call.number, call.forward)
            if value.what == _GIVEN:
                inputs[at] = status
                continue
            compared += status != _UNKNOWN
            if status == _WRONG:
                given = inputs.get(at)
                if given != _WRONG:
                    known = given != _UNKNOWN
                    return dataclasses.replace(self._found(value, OUTPUT), input_known=known)
                return dataclasses.replace(self._found(value, INPUT), moved=moved)
            if status == _MOVED and call.name not in moved:
                moved.append(call.name)
        return self._of_backward(rank, compared) if compared else None

    def _comparable(self, rank: int, values: Iterator[_Value]) -> Iterator[_Value]:
        """Yields those that are not of a stage of a pipeline as a whole, nor of what stands there
        for a layer that another stage has."""
        names = {call.name for call in self._job[rank].calls}
        stage = bool(self._kinds.keys() - names)
        whole = {one for one in names if all(_inside(o, one) or _inside(one, o) for o in names)}
        for value in values:
            name, kind = value.call.name, value.call.kind
            if kind == "Identity" and self._kinds.get(name) != kind:
                continue
            if not (stage and name in whole):
                yield value

    def _of_backward(self, rank: int, compared: int) -> WrongModule:
        values = list(self._comparable(rank, _backward(self._job[rank])))
        factors: Dict[int, float] = {}
        parts: List[_Value] = []
        for at, value in enumerate(values):
            forward = value.call.forward
            if forward not in factors:
                factor = self._factor(rank, value)
                if factor is None:  # of the loss, or of what another stage sends
                    at_loss = value.call.name in self._last
                    return self._found(value, LOSS if at_loss else GRADIENT)
                factors[forward] = factor
            status = self._status(rank, value, factors[forward])
            if status in (_WRONG, _PART):
                parts.append(_named(values, at))
            elif status in (_RIGHT, _MOVED):
                parts = []
            if status == _WRONG:
                return self._found(parts[0], PART if len(parts) > 1 else GRADIENT)
        if parts:
            return self._found(parts[0], PART)
        return WrongModule("", what=AFTER, compared=compared, factors=list(factors.values()))

    def _found(self, value: _Value, what: str) -> WrongModule:
        call, order = value.call, self._order.get(value.key, len(self._order))
        return WrongModule(
            call.name, call.kind, call.at, what, order, of_output=value.what == _OF_OUTPUT
        )

    def _factor(self, rank: int, value: _Value) -> Optional[float]:
        """Returns by what the gradients of this forward are multiplied on this rank; None if the
        first gradient is no multiple of the reference's."""
        expected = self._expected(rank, value)
        if expected is None:
            return 1.0
        own, world = value.tensor.double().reshape(-1), len(self._job)
        candidates = [1.0, float(world), 1.0 / world]
        for right in expected.parts:
            if value.tensor.shape == right.shape and float(right.norm()) > 0:
                flat = right.double().reshape(-1)
                candidates.insert(0, float(own @ flat / (flat @ flat)))
        right_ones = (_RIGHT, _MOVED)
        return next((f for f in candidates if self._status(rank, value, f) in right_ones), None)

    def _status(self, rank: int, value: _Value, factor: float = 1.0) -> str:
        right = self._expected(rank, value)
        if right is None:
            return _UNKNOWN
        allowed = self._allowed(value.key) * abs(factor)
        apart = (_apart(value.tensor.float(), part * factor) for part in right.parts)
        errors = [error for error in apart if error is not None]
        if not errors:
            return _UNKNOWN
        if min(errors) <= allowed:
            return _RIGHT
        elsewhere = _apart(value.tensor.float(), right.whole * factor)
        if elsewhere is not None and elsewhere <= allowed:
            return _MOVED
        added = (self._adds_up(rank, value, part * factor, allowed) for part in right.parts)
        return _PART if any(added) else _WRONG

    def _adds_up(self, rank: int, value: _Value, right: torch.Tensor, allowed: float) -> bool:
        """Whether the values of the ranks with these samples are parts of a sum that is right."""
        forward = value.call.forward
        mine = self._job[rank].rows[forward]
        alike = [r for r, calls in self._job.items() if calls.rows[forward : forward + 1] == [mine]]
        own = [self._ranks[r].get(value.key, {}).get(forward) for r in alike]
        tensors = [one.float() for one in own if one is not None and one.shape == right.shape]
        if len(tensors) < max(2, len(alike)):
            return False
        return float((torch.stack(tensors).sum(0) - right).abs().max()) <= len(alike) * allowed

    def _allowed(self, key: _Key) -> float:
        noise, scale = 0.0, 0.0
        for forward, exact in self._single.get(key, {}).items():
            moved = self._rounded.get(key, {}).get(forward)
            if exact.numel():
                scale = max(scale, float(exact.float().abs().max()))
                if moved is not None and moved.shape == exact.shape:
                    noise = max(noise, float((exact.float() - moved.float()).abs().max()))
        return max(TIMES * noise, TOLERANCE.floor * scale)

    def _expected(self, rank: int, value: _Value) -> Optional[_Right]:
        """Returns the reference's values of the samples of this call, or all of them."""
        single = self._single.get(value.key)
        if single is None:
            return None
        own, places = self._job[rank].rows[value.call.forward], []
        if own != self._alone.rows[0] or len(self._alone.rows) > 1:
            places = self._places[rank][value.call.forward]
        if places and self._by_sample(value.key):
            if any(one.forward not in single for one in places):
                return None
            whole = torch.stack([single[one.forward][one.row].float() for one in places])
        else:
            # A later stage of a pipeline sees no samples, and all micro-batches in their order.
            alike = not own and len(self._job[rank].rows) == len(self._alone.rows)
            some = {value.call.forward} if alike else set(range(len(self._alone.rows)))
            forwards = {one.forward for one in places} or some
            if len(forwards) > 1 or not forwards <= set(single):
                return None
            whole = single[forwards.pop()].float()
        return _Right(_of_part(value.tensor, whole, places) or [whole], whole)

    def _by_sample(self, key: _Key) -> bool:
        """Whether the first dim of this value is that of the samples, in all calls."""
        runs = [(self._single, self._alone)]
        runs += [(self._ranks[rank], calls) for rank, calls in self._job.items()]
        return all(
            len(tensor) == len(calls.rows[forward])
            for by_key, calls in runs
            for forward, tensor in by_key.get(key, {}).items()
        )


def _inside(name: str, other: str) -> bool:
    return not other or f"{name}.".startswith(f"{other}.")


def _of_part(
    own: torch.Tensor, whole: torch.Tensor, places: Sequence[_Place]
) -> List[torch.Tensor]:
    """Returns what ``whole`` has at the rank's positions of the sequence, where all of its samples
    are such parts: for each dim of the sequence's size."""
    parts = [one.part for one in places if one.part is not None]
    if len(parts) < len(places) or not parts or own.dim() != whole.dim():
        return []
    part, size = parts[0], (len(parts[0]), places[0].length)
    if any(not torch.equal(one, part) for one in parts):
        return []
    dims = [d for d in range(own.dim()) if (own.shape[d], whole.shape[d]) == size]
    return [whole.index_select(d, part) for d in dims]


def _named(values: Sequence[_Value], at: int) -> _Value:
    """Returns the name of a gradient that says more: one tensor is the output of a module and the
    input of the next one, which is the one that computes its gradient."""
    first = values[at]
    for other in values[at:]:
        if other.tensor.shape != first.tensor.shape or not torch.equal(other.tensor, first.tensor):
            break
        if other.what == _OF_GIVEN:
            return other
    return first


def _apart(own: torch.Tensor, right: torch.Tensor) -> Optional[float]:
    """Returns the largest difference, of a part of one dim from the nearest values; None if
    ``own`` cannot be a part of ``right``."""
    if not own.numel():
        return 0.0
    if own.shape == right.shape:
        return float((own - right).abs().max())
    if own.dim() != right.dim():
        return None
    other = [d for d in range(own.dim()) if own.shape[d] != right.shape[d]]
    dim = other[0]
    if len(other) > 1 or not own.shape[dim] < right.shape[dim] <= _MOST_SLICES:
        return None
    mine = own.movedim(dim, 0).reshape(own.shape[dim], -1)
    nearest = torch.cdist(
        mine, right.movedim(dim, 0).reshape(right.shape[dim], -1), p=float("inf")
    ).min(1)
    return float(nearest.values.max())
