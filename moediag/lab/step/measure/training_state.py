"""A rank's part of the training state, and the differences between two states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional

import torch

from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import StateDifference
from moediag.protocol.names import clean_fqn
from moediag.recorder.step import pieces

Tensors = Dict[str, torch.Tensor]


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
