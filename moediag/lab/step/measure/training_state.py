"""The training state: a rank's part, that of all ranks put together, a copy of it into a model with
another layout, and the differences between two states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

import torch
import torch.distributed as dist

from moediag.lab.step.models import tiny
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import StateDifference
from moediag.protocol.names import clean_fqn
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step import pieces

Tensors = Dict[str, torch.Tensor]
_WEIGHT = "weight"
Shapes = Mapping[str, Tuple[int, ...]]  # of whole parameters, by FQN
Values = Dict[str, torch.Tensor]  # of one parameter: _WEIGHT, and the optimizer's by their names
Part = Tuple[torch.Tensor, Values]  # the places of a rank's elements in the whole tensor, flattened


@dataclass(frozen=True)
class State:
    """The local state, on the CPU."""

    weights: Tensors  # by FQN
    optimizer: Tensors  # by "FQN exp_avg"
    settings: List[Dict[str, Any]]  # comparable settings of each parameter group, in order


def of(wrapped: Wrapped) -> State:
    """Returns a copy of the current state. No communication."""
    names = {id(p): clean_fqn(name) for name, p in wrapped.model.named_parameters()}
    optimizer = wrapped.own_optimizer
    kept: Tensors = {}
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, (torch.Tensor, int, float)):
                kept[f"{names.get(id(parameter), '?')} {name}"] = _copy(torch.as_tensor(value))
    return State(
        weights={clean_fqn(name): _copy(p) for name, p in wrapped.model.named_parameters()},
        optimizer=kept,
        settings=[_settings(group) for group in optimizer.param_groups],
    )


def _copy(tensor: Any) -> torch.Tensor:
    return pieces.local(tensor).cpu().clone()


def _settings(group: Dict[str, Any]) -> Dict[str, Any]:
    found: Dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        plain = isinstance(value, (bool, int, float, str)) or value is None
        if plain or (isinstance(value, (list, tuple)) and name == "betas"):
            found[name] = tuple(float(v) for v in value) if name == "betas" else value
    return found


def difference(before: State, after: State) -> StateDifference:
    return StateDifference(
        weights=_differ(before.weights, after.weights),
        optimizer=_differ(before.optimizer, after.optimizer),
        settings=_settings_differ(before.settings, after.settings),
        compared=len(before.weights) + len(before.optimizer),
    )


def _differ(before: Tensors, after: Tensors) -> Dict[str, Optional[float]]:
    found: Dict[str, Optional[float]] = {}
    for name in dict.fromkeys((*before, *after)):
        one, other = before.get(name), after.get(name)
        if one is None or other is None or one.shape != other.shape:
            found[name] = None
        elif not _equal(one, other):
            found[name] = float((one.double() - other.double()).abs().max())
    return found


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the tensors are equal; a nan equals itself, because it was saved and loaded."""
    same = (one == other) | (one.isnan() & other.isnan())
    return bool(same.all())


def _settings_differ(before: List[Dict[str, Any]], after: List[Dict[str, Any]]) -> List[str]:
    if len(before) != len(after):
        return [f"{len(before)} parameter groups, then {len(after)}"]
    found: Dict[str, None] = {}
    for one, other in zip(before, after):  # noqa: B905 - Python 3.9 has no strict
        for name in one:
            if name in other and one[name] != other[name]:
                found[f"{name} {one[name]}, then {other[name]}"] = None
    return list(found)


def gathered(wrapped: Wrapped) -> Dict[str, Values]:
    """Returns FQN -> whole tensors. Collective. Raises NotApplicable, on all ranks alike."""
    if not wrapped.tells_slices:
        raise NotApplicable(
            f"wrapper {wrapped.trial.wrapper.kind} does not say which part of a parameter it holds"
        )
    with torch.device("meta"):
        model = tiny.build(wrapped.trial.model, wrapped.trial.step.seed)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    everybody: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, parts(wrapped, shapes))
    return put_together(everybody, shapes)


def parts(wrapped: Wrapped, shapes: Shapes) -> Dict[str, Part]:
    """Returns FQN -> what this rank holds of a parameter and of its optimizer state."""
    parameters, state = _parameters(wrapped, shapes), wrapped.own_optimizer.state
    found = {}
    for fqn, local, select in wrapped.weights():
        values = {_WEIGHT: local, **state[parameters[fqn]]}
        places = select(torch.arange(math.prod(shapes[fqn])).view(shapes[fqn]))
        found[fqn] = places, {name: pieces.local(v).cpu() for name, v in values.items()}
    return found


def put_together(ranks: Iterable[Mapping[str, Part]], shapes: Shapes) -> Dict[str, Values]:
    """Returns FQN -> whole tensors. What is not one number per element stays as it is."""
    whole: Dict[str, Values] = {fqn: {} for fqn in shapes}
    for rank in ranks:
        for fqn, (places, values) in rank.items():
            for name, value in values.items():
                if value.shape != places.shape:
                    whole[fqn][name] = value
                    continue
                empty = torch.zeros(shapes[fqn], dtype=value.dtype)
                whole[fqn].setdefault(name, empty).view(-1)[places.reshape(-1)] = value.reshape(-1)
    return whole


@torch.no_grad()
def place(whole: Mapping[str, Values], wrapped: Wrapped) -> None:
    """Copies this rank's part of everything into a model that has not been trained. No
    communication."""
    shapes = {fqn: tuple(values[_WEIGHT].shape) for fqn, values in whole.items()}
    parameters, state = _parameters(wrapped, shapes), wrapped.own_optimizer.state
    for fqn, local, select in wrapped.weights():
        parameter = parameters[fqn]
        assert local is not None
        for name, value in whole[fqn].items():
            if value.shape != whole[fqn][_WEIGHT].shape:
                state[parameter][name] = value.clone()
                continue
            if name != _WEIGHT:
                state[parameter][name] = torch.zeros_like(parameter)
                local = pieces.local(state[parameter][name])
            local.copy_(select(value))


def _parameters(wrapped: Wrapped, shapes: Shapes) -> Dict[str, Any]:
    """Returns parameters by FQN. Raises NotApplicable for a DTensor of a part of one: its
    placements do not say which part."""
    found = {clean_fqn(name): p for name, p in wrapped.model.named_parameters()}
    for fqn, parameter in found.items():
        if pieces.distributed(parameter) and tuple(parameter.shape) != shapes[fqn]:
            raise NotApplicable(f"{fqn} is a DTensor of a part of the parameter's rows")
    return found
