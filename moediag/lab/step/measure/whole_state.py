"""The training state of all ranks put together, and its copy into a model with another layout.

Nothing is written to a disk: this is what a checkpoint has to restore.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Mapping, Tuple

import torch
import torch.distributed as dist

from moediag.lab.step.models import tiny
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol.names import clean_fqn
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step import pieces

_WEIGHT = "weight"
Shapes = Mapping[str, Tuple[int, ...]]  # of whole parameters, by FQN
Values = Dict[str, torch.Tensor]  # of one parameter: _WEIGHT, and the optimizer's by their names
Part = Tuple[torch.Tensor, Values]  # the places of a rank's elements in the whole tensor, flattened


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
