"""Where a parameter lies: mesh axes, sizes, and words about them."""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

from moediag.lab.check import placed
from moediag.lab.step.shard.declared_slices import is_sharding
from moediag.protocol import MeshSlice
from moediag.recorder import placement

_NAMED = 6  # names in a sentence


def kind(parameter: Any) -> Any:
    """Returns a value that is equal for parameters placed alike."""
    if not placement.distributed(parameter):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    return (tuple(names), tuple(parameter.device_mesh.shape), tuple(map(str, parameter.placements)))


def axes(parameter: Any) -> str:
    """Returns the axes of a parameter's mesh, "" for a plain tensor."""
    if not placement.distributed(parameter):
        return ""
    return " x ".join(map(str, parameter.device_mesh.mesh_dim_names or ("a mesh",)))


def divided(parameter: Any) -> List[placed.Placed]:
    """Returns the placements of a DTensor that divide it."""
    dims = parameter.dim()
    return [
        (axis, one.dim % dims, "Strided" in type(one).__name__)
        for axis, one in enumerate(parameter.placements) if is_sharding(one)
    ]  # fmt: skip


def slices(parameter: Any) -> List[MeshSlice]:
    """Returns what each axis of its mesh does; empty for a plain tensor."""
    if not placement.distributed(parameter):
        return []
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ("mesh",) * mesh.ndim
    cut = {axis: dim for axis, dim, _ in divided(parameter)}
    return [MeshSlice(str(n), mesh.size(axis), cut.get(axis)) for axis, n in enumerate(names)]


def sizes(parameter: Any) -> Tuple[int, int]:
    """Returns the elements of the rank that holds most, and of the one that holds least."""
    if not placement.distributed(parameter):
        return parameter.numel(), parameter.numel()
    mesh = parameter.device_mesh
    counts = [mesh.size(axis) for axis in range(mesh.ndim)]
    return placed.most_and_least(tuple(parameter.shape), counts, divided(parameter))


def listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
