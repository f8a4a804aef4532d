"""FSDP2's groups of parameters, which are gathered and reduced together, in one dtype."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, List

from moediag.lab.check.simulated_group import raised
from moediag.lab.check.tensor_places import listed
from moediag.lab.step.models.plan_names import generic
from moediag.lab.step.shard import fsdp2_internals
from moediag.protocol import FAILS, CheckFinding, PlannedUnit
from moediag.protocol.names import clean_fqn


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


def mixed_dtypes(model: Any, part: str) -> Iterator[CheckFinding]:
    """Groups that torch refuses in the first forward: it asks each of them here."""
    names = {id(parameter): clean_fqn(name) for name, parameter in model.named_parameters()}
    told = set()
    for group in fsdp2_internals.parameter_groups(model):
        try:
            group._init_mp_dtypes()
        except AssertionError as error:
            kinds: Dict[str, List[str]] = {}
            for held in group.fsdp_params:
                dtype = str(held.orig_dtype).replace("torch.", "")
                kinds.setdefault(dtype, []).append(generic(names[id(held.sharded_param)]))
            few, most = sorted(kinds, key=lambda dtype: len(kinds[dtype]))[:: len(kinds) - 1]
            odd = listed(sorted(set(kinds[few])))
            if odd in told:
                continue
            told.add(odd)
            found = raised(error)
            says = f"{found.kind}: {found.text.partition(' but got')[0]}"
            yield CheckFinding(
                part, FAILS,
                f"{odd} ({few}) beside {most} in one FSDP unit: the first forward raises. Ways "
                "out: float32 with MixedPrecisionPolicy, own units, a cast. moediag run "
                f"mixed-dtype-unit tries them. {says}",
                found.where,
            )  # fmt: skip


def _unit(group: Any, names: Dict[int, str], freed: bool) -> Dict[str, Any]:
    mesh = group.mesh_info
    parameters = group.fsdp_params
    padded = sum(math.prod(p.padded_sharded_param_size) for p in parameters)
    modules = [names.get(id(module), "") for module in getattr(group, "modules", ())]
    shown = sorted({generic(name) for name in modules if name}) or ["(root)"]
    dims = mesh.mesh.mesh_dim_names or ("mesh",)
    freed = freed and group.post_forward_mesh_info is not None
    first = parameters[0].sharded_param if parameters else None
    policy = group.mp_policy
    stored = first.dtype if first is not None else None
    gathered = policy.param_dtype or stored
    reduced = policy.reduce_dtype or gathered
    return dict(
        module=" + ".join(shown), count=1, axis=str(dims[-1]), shards=mesh.shard_mesh_size,
        replicas=getattr(mesh, "replicate_mesh_size", 1),
        element=gathered.itemsize if gathered is not None else 0,
        parameters=len(parameters), elements=sum(math.prod(p._orig_size) for p in parameters),
        gathered=padded * mesh.shard_mesh_size,
        gathers=2 if freed else 1,
        reduced_element=reduced.itemsize if reduced is not None else 0,
    )  # fmt: skip


def _root_groups(state: Any) -> List[Any]:
    listed = getattr(state, "_fsdp_param_groups", None)
    if listed is None:
        one = getattr(state, "_fsdp_param_group", None)
        listed = [one] if one is not None else []
    return list(listed)
