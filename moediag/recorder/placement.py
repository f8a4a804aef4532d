"""Determines which elements of the whole tensor a rank's local part has, by torch's own placement
code.

The local part of ``arange(numel)``, distributed like the parameter, identifies every element:
correct for any placement (strided, uneven, several mesh axes) without special cases here.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import torch

from moediag.recorder.not_applicable import NotApplicable


def distributed(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local(tensor: Any) -> torch.Tensor:
    """Returns this rank's part, without its history; the tensor itself if it is plain."""
    part = tensor.to_local() if distributed(tensor) else tensor
    result: torch.Tensor = part.detach()
    return result


def index(parameter: Any) -> Optional[torch.Tensor]:
    """Returns the position of each local element in the flattened whole tensor: int64, shape of the
    local part. None for a plain tensor. No communication. Raises NotApplicable if torch does not
    say."""
    if not distributed(parameter):
        return None
    from torch.distributed.tensor import distribute_tensor

    whole = torch.arange(parameter.numel(), dtype=torch.int64).view(parameter.shape)
    whole = whole.to(parameter.device_mesh.device_type)
    placements = [_gathered(p) for p in parameter.placements]
    try:
        placed: Any = distribute_tensor(
            whole, parameter.device_mesh, placements, src_data_rank=None
        )
    except TypeError:  # torch < 2.7 has no src_data_rank, but chunks alone need none
        return _chunks(whole, parameter)
    result: torch.Tensor = placed.to_local().cpu()
    return result


def piece(whole: torch.Tensor, shape: Sequence[int], at: Optional[int]) -> torch.Tensor:
    """Returns the part of ``whole`` that a plain tensor of ``shape`` is: if it is smaller along one
    dimension, the ``at``-th of equal pieces. Returns ``whole`` itself if that is impossible (``at``
    None, other shapes, no such piece)."""
    if at is None or whole.ndim != len(shape):
        return whole
    cut = [dim for dim, size in enumerate(shape) if size != whole.shape[dim]]
    if len(cut) != 1 or (at + 1) * shape[cut[0]] > whole.shape[cut[0]]:
        return whole
    return whole.narrow(cut[0], at * shape[cut[0]], shape[cut[0]])


def _gathered(placement: Any) -> Any:
    """Replaces an unreduced sum, which has the whole shape on every rank like a copy."""
    from torch.distributed.tensor import Replicate

    return Replicate() if placement.is_partial() else placement


def _chunks(whole: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Cuts plain shards: each mesh axis cuts what the previous ones left, like torch.chunk."""
    if any("Strided" in type(p).__name__ for p in parameter.placements):
        raise NotApplicable(f"torch {torch.__version__} cannot tell where a strided shard lies")
    coordinate = parameter.device_mesh.get_coordinate()
    part = whole
    for mesh_dim, placement in enumerate(parameter.placements):
        if not placement.is_shard():
            continue
        pieces = torch.chunk(part, parameter.device_mesh.size(mesh_dim), dim=placement.dim)
        at = coordinate[mesh_dim]
        part = pieces[at] if at < len(pieces) else part.narrow(placement.dim, 0, 0)
    return part.cpu()


def placement(parameter: Any) -> str:
    """Returns ``Shard(0) on ep[2]``, ``Shard(0) on dp_shard[2] x Shard(1) on tp[2]``, or ""."""
    if not distributed(parameter):
        return ""
    names: Sequence[Any] = parameter.device_mesh.mesh_dim_names or ()
    pieces: List[str] = []
    for dim, placed in enumerate(parameter.placements):
        size = parameter.device_mesh.size(dim)
        axis = names[dim] if dim < len(names) and names[dim] else "mesh"
        if size > 1 or parameter.device_mesh.ndim == 1:  # an axis of one rank divides nothing
            pieces.append(f"{_short(placed)} on {axis}[{size}]")
    return " x ".join(pieces)


def _short(placed: Any) -> str:
    dim = getattr(placed, "dim", None)
    return type(placed).__name__.lstrip("_") + (f"({dim})" if dim is not None else "")
