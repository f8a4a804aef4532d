"""FSDP2's groups of parameters, which are gathered and reduced together."""

from __future__ import annotations

import math
from typing import Any, Dict, List

from moediag.lab.step.models.plan_names import generic
from moediag.lab.step.shard import fsdp2_internals
from moediag.protocol import PlannedUnit


def units(model: Any) -> List[PlannedUnit]:
    """Returns the FSDP2 groups of a model, those alike together, in the order of its modules."""
    names = {id(module): name for name, module in model.named_modules()}
    found: Dict[PlannedUnit, int] = {}
    state = getattr(model, "_get_fsdp_state", None)
    automatic = state is not None and getattr(state(), "_auto_reshard_after_forward", False)
    roots = _root_groups(state()) if state is not None else []
    groups = {id(group): group for group in fsdp2_internals.parameter_groups(model)}
    for group in groups.values():  # one of several modules is listed with each of them
        unit = _unit(group, names, freed=not (automatic and group in roots))
        key = PlannedUnit(**{**unit, "count": 1})
        found[key] = found.get(key, 0) + 1
    return [PlannedUnit(**{**vars(unit), "count": count}) for unit, count in found.items()]


def _unit(group: Any, names: Dict[int, str], freed: bool) -> Dict[str, Any]:
    mesh = group.mesh_info
    parameters = group.fsdp_params
    padded = sum(math.prod(p.padded_sharded_param_size) for p in parameters)
    modules = [names.get(id(module), "") for module in getattr(group, "modules", ())]
    shown = sorted({generic(name) for name in modules if name}) or ["(root)"]
    dims = mesh.mesh.mesh_dim_names or ("mesh",)
    freed = freed and group.post_forward_mesh_info is not None
    first = parameters[0].sharded_param if parameters else None
    return dict(
        module=" + ".join(shown), count=1, axis=str(dims[-1]), shards=mesh.shard_mesh_size,
        replicas=getattr(mesh, "replicate_mesh_size", 1),
        element=first.element_size() if first is not None else 0,
        parameters=len(parameters), elements=sum(math.prod(p._orig_size) for p in parameters),
        gathered=padded * mesh.shard_mesh_size,
        gathers=2 if freed else 1,
    )  # fmt: skip


def _root_groups(state: Any) -> List[Any]:
    listed = getattr(state, "_fsdp_param_groups", None)
    if listed is None:
        one = getattr(state, "_fsdp_param_group", None)
        listed = [one] if one is not None else []
    return list(listed)
