"""Which part of the whole tensor this rank's piece of a parameter is, as its placements declare.

No communication: a DTensor's mesh and placements say it, and for plain tensors that hold only some
rows (the experts of transformers' expert parallelism up to 5.15) the wrapper does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

import torch

WHOLE = ":"


@dataclass(frozen=True)
class PlainShards:
    """Plain tensors of which each rank of ``group`` (None: nobody but this rank) holds other rows.

    ``rows``: FQN -> [first, last) of dim 0 of the whole tensor that this rank holds.
    """

    rows: Dict[str, Tuple[int, int]] = field(default_factory=dict)
    group: Optional[Any] = None


def is_dtensor(tensor: Any) -> bool:
    """Without importing torch.distributed.tensor, which plain models do not need."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local(tensor: Any) -> torch.Tensor:
    """This rank's piece, detached; the same storage."""
    piece: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return piece.detach()


def describe(fqn: str, parameter: Any, plain: PlainShards) -> str:
    """``"0:4,:,:"``: indices of the whole tensor along each dim, ``":"`` for all of them; a piece
    that is not one range is written ``"0:2+4:6"``; the whole tensor is ``":"``."""
    if is_dtensor(parameter):
        held = indices(parameter)
        return _text([_span(held[dim], n) for dim, n in enumerate(parameter.shape)])
    if fqn in plain.rows:
        first, last = plain.rows[fqn]
        return _text([f"{first}:{last}"] + [WHOLE] * (parameter.dim() - 1))
    return WHOLE


def indices(parameter: Any) -> List[torch.Tensor]:
    """For each dim of DTensor ``parameter`` the indices of the whole that this rank holds, int64.

    Sharding along one dim never depends on another, so each is cut by itself, mesh dims from the
    outermost in. ``_StridedShard`` (FSDP over a tensor that is already sharded) takes every n-th
    of ``n * split_factor`` chunks, as torch's own ``_split_tensor`` does.
    """
    coordinate = parameter.device_mesh.get_coordinate()
    held = [torch.arange(n) for n in parameter.shape]
    for mesh_dim, placement in enumerate(parameter.placements):
        if not is_sharding(placement):
            continue
        parts = parameter.device_mesh.size(mesh_dim)
        dim = placement.dim % len(held)
        factor = int(getattr(placement, "split_factor", 1))
        chunks = torch.chunk(held[dim], parts * factor)
        own = chunks[coordinate[mesh_dim] :: parts] if coordinate is not None else ()
        held[dim] = torch.cat(list(own)) if own else held[dim][:0]
    return held


def is_sharding(placement: Any) -> bool:
    """Shard or _StridedShard, which from torch 2.13 on is no subclass of it."""
    return hasattr(placement, "dim") and not placement.is_partial()


def holders(parameter: Any, world_size: int) -> int:
    """How many ranks of the world hold this same slice, if all ranks hold some slice."""
    if not is_dtensor(parameter):
        return world_size
    pieces = 1
    for mesh_dim, placement in enumerate(parameter.placements):
        if is_sharding(placement):
            pieces *= parameter.device_mesh.size(mesh_dim)
    return max(world_size // pieces, 1)


def mesh_name(parameter: Any) -> str:
    """``plain``, or ``ep [[0, 1], [2, 3]]``: a DTensor's mesh dims and its ranks."""
    if not is_dtensor(parameter):
        return "plain"
    mesh = parameter.device_mesh
    names = ",".join(mesh.mesh_dim_names or ()) or "unnamed"
    return f"{names} {mesh.mesh.tolist()}"


def _span(index: torch.Tensor, size: int) -> str:
    """Consecutive runs joined by "+"."""
    if len(index) == size:
        return WHOLE
    if not len(index):
        return "0:0"
    values = index.tolist()
    runs: List[List[int]] = [[values[0], values[0] + 1]]
    for value in values[1:]:
        if value == runs[-1][1]:
            runs[-1][1] = value + 1
        else:
            runs.append([value, value + 1])
    return "+".join(f"{first}:{last}" for first, last in runs)


def _text(spans: List[str]) -> str:
    return WHOLE if all(span == WHOLE for span in spans) else ",".join(spans)
