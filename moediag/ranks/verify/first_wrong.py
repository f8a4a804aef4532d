"""The first module that computes something wrong: in the forward the first output that one process
does not have, in the backward the first gradient of a module's input or output.

A rank has some rows of the reference's tensors (its samples), or a part of one dim (of the
sequence, of the features): the rows are known by the samples, the parts are found by their values.
Gradients of activations are compared up to the factor that the rank's own loss has.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from moediag.protocol.outcome import AFTER, GRADIENT, INPUT, LOSS, OUTPUT, PART, WrongModule
from moediag.protocol.tolerance import GRADIENT as TOLERANCE
from moediag.ranks.verify.module_calls import Call, Calls
from moediag.ranks.verify.noise import TIMES

_RIGHT, _PART, _WRONG, _UNKNOWN = "right", "part", "wrong", "unknown"
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
        self._row: Dict[str, Optional[Tuple[int, int]]] = {}  # sample -> forward and row
        for forward, rows in enumerate(alone.rows):
            for at, row in enumerate(rows):
                self._row[row] = None if row in self._row else (forward, at)

    def of_rank(self, rank: int) -> Optional[WrongModule]:
        """Returns the first wrong module of this rank, or that all is right; None if nothing could
        be compared."""
        compared = 0
        inputs: Dict[Tuple[str, int, int], str] = {}
        for value in filter(self._comparable, _forward(self._job[rank])):
            call = value.call
            status = self._status(rank, value)
            if value.what == _GIVEN:
                inputs[(*call.key, call.forward)] = status
                continue
            compared += status != _UNKNOWN
            if status == _WRONG:
                given = inputs.get((*call.key, call.forward))
                return self._found(value, INPUT if given == _WRONG else OUTPUT)
        return self._of_backward(rank, compared) if compared else None

    def _comparable(self, value: _Value) -> bool:
        """Whether it is not of a stage of a pipeline as a whole, nor of what stands there for a
        layer that another stage has."""
        call = value.call
        return call.kind == self._kinds.get(call.name) or not (
            call.name == "" or call.kind == "Identity"
        )

    def _of_backward(self, rank: int, compared: int) -> WrongModule:
        values = list(filter(self._comparable, _backward(self._job[rank])))
        factors: Dict[int, float] = {}
        parts: List[_Value] = []
        for at, value in enumerate(values):
            forward = value.call.forward
            if forward not in factors:
                factor = self._factor(rank, value)
                if factor is None:
                    return self._found(value, LOSS)
                factors[forward] = factor
            status = self._status(rank, value, factors[forward])
            if status in (_WRONG, _PART):
                parts.append(_named(values, at))
            elif status == _RIGHT:
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
        own, right = value.tensor, self._expected(rank, value)
        if right is None:
            return 1.0
        world = len(self._job)
        candidates = [1.0, float(world), 1.0 / world]
        if own.shape == right.shape and float(right.norm()) > 0:
            flat = right.double().reshape(-1)
            candidates.insert(0, float(own.double().reshape(-1) @ flat / (flat @ flat)))
        return next((f for f in candidates if self._status(rank, value, f) == _RIGHT), None)

    def _status(self, rank: int, value: _Value, factor: float = 1.0) -> str:
        right = self._expected(rank, value)
        if right is None:
            return _UNKNOWN
        allowed = self._allowed(value.key) * abs(factor)
        error = _apart(value.tensor.float(), right * factor)
        if error is None:
            return _UNKNOWN
        if error <= allowed:
            return _RIGHT
        return _PART if self._adds_up(value, right * factor, allowed) else _WRONG

    def _adds_up(self, value: _Value, right: torch.Tensor, allowed: float) -> bool:
        """Whether the ranks' values are parts of a sum that is right."""
        forward = value.call.forward
        rows = [calls.rows[forward : forward + 1] for calls in self._job.values()]
        own = [ranks.get(value.key, {}).get(forward) for ranks in self._ranks.values()]
        tensors = [one.float() for one in own if one is not None and one.shape == right.shape]
        if any(one != rows[0] for one in rows) or len(tensors) < max(2, len(rows)):
            return False
        return float((torch.stack(tensors).sum(0) - right).abs().max()) <= len(rows) * allowed

    def _allowed(self, key: _Key) -> float:
        noise, scale = 0.0, 0.0
        for forward, exact in self._single.get(key, {}).items():
            moved = self._rounded.get(key, {}).get(forward)
            if exact.numel():
                scale = max(scale, float(exact.float().abs().max()))
                if moved is not None and moved.shape == exact.shape:
                    noise = max(noise, float((exact.float() - moved.float()).abs().max()))
        return max(TIMES * noise, TOLERANCE.floor * scale)

    def _expected(self, rank: int, value: _Value) -> Optional[torch.Tensor]:
        """Returns the reference's values of the samples of this call, or all of them."""
        single = self._single.get(value.key)
        if single is None:
            return None
        own = self._job[rank].rows[value.call.forward]
        places = [self._row.get(row) for row in own]
        known = [place for place in places if place is not None]
        whole = single[0].float() if list(single) == [0] and len(self._alone.rows) == 1 else None
        if own == self._alone.rows[0] and whole is not None:
            return whole
        if known and len(known) == len(own) and self._by_sample(value.key):
            if any(forward not in single for forward, _ in known):
                return None
            return torch.stack([single[forward][at].float() for forward, at in known])
        return whole

    def _by_sample(self, key: _Key) -> bool:
        """Whether the first dim of this value is that of the samples, in all calls."""
        runs = [(self._single, self._alone)]
        runs += [(self._ranks[rank], calls) for rank, calls in self._job.items()]
        return all(
            len(tensor) == len(calls.rows[forward])
            for by_key, calls in runs
            for forward, tensor in by_key.get(key, {}).items()
        )


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
