"""Gradient clipping, and the norm it uses.

Every parameter's squared norm must count once, however its pieces are distributed, and every rank
must scale by the same factor. ``torch`` and ``accelerate`` are the released functions; ``local`` is
what users write if the first one raises; ``per-mesh`` is correct.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist
from torch import nn

from moediag.lab.step.shard.declared_slices import PlainShards
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step.pieces import axes_of, distributed, local

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def clip(parameters: Dict[str, Any], limit: float, how: str, plain: PlainShards) -> float:
    """Scales the gradients of ``parameters`` (by FQN) down to norm ``limit``; returns the norm
    before.

    ``how``: torch | accelerate | local | per-mesh. Collective. Raises what the released functions
    raise, and NotApplicable.
    """
    if how == "torch":
        norm: Any = nn.utils.clip_grad_norm_(list(parameters.values()), limit)
        return float(norm.full_tensor() if distributed(norm) else norm)
    if how == "accelerate":
        return _accelerate(list(parameters.values()), limit)
    gradients = {fqn: p.grad for fqn, p in parameters.items() if p.grad is not None}
    if how == "per-mesh":
        total = per_mesh_norm(gradients, plain)
    elif how == "local":
        total = float(local_norm(gradients.values()))
    else:
        raise NotApplicable(f"unknown clipping {how!r}")
    scale(list(gradients.values()), limit, total)
    return total


def local_norm(gradients: Any) -> torch.Tensor:
    """Returns the L2 norm of this rank's pieces, unreduced; float64 on the gradients' device."""
    squares = [torch.linalg.vector_norm(local(g).double()) ** 2 for g in gradients]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


def per_mesh_norm(gradients: Dict[str, Any], plain: PlainShards) -> float:
    """Returns the norm of the whole gradient, equal on all ranks. The squared norms of each mesh's
    pieces are summed over the mesh dims that shard them (a replica counts once), those of ``plain``
    also over its group; plain whole tensors count as they are. Collective over every mesh."""
    groups: Dict[Any, List[Any]] = {}
    for fqn, held in gradients.items():
        gradient = _reduced(held)
        groups.setdefault(_spread(fqn, gradient, plain), []).append(gradient)
    squares: List[torch.Tensor] = []
    # All ranks of a group need the same order: that of the parameters.
    for (mesh, sharded, by_group), members in groups.items():
        square = local_norm(members) ** 2
        for mesh_dim in sharded:
            dist.all_reduce(square, group=mesh.get_group(mesh_dim))
        if by_group:
            dist.all_reduce(square, group=plain.group)
        squares.append(square)
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _spread(fqn: str, gradient: Any, plain: PlainShards) -> Any:
    """Returns (mesh or None, the mesh dims that shard it, whether the group shards it)."""
    by_group = plain.group is not None and fqn in plain.rows
    axes = axes_of(gradient)
    if not axes:
        return None, (), by_group
    sharded = tuple(number for number, axis in enumerate(axes) if axis.dim is not None)
    return gradient.device_mesh, sharded, by_group


def _reduced(gradient: Any) -> Any:
    """Returns ``gradient`` with pending sums reduced: the norm of a sum is not the sum of norms."""
    if not any(axis.placed.is_partial() for axis in axes_of(gradient)):
        return gradient
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if p.is_partial() else p for p in gradient.placements]
    return gradient.redistribute(placements=placements)


def scale(gradients: List[Any], limit: float, norm: float) -> None:
    """Scales ``gradients`` of total ``norm`` down to ``limit``."""
    factor = min(limit / (norm + _EPSILON), 1.0)
    for gradient in gradients:
        local(gradient).mul_(factor)


def _accelerate(parameters: List[Any], limit: float) -> float:
    """Calls ``Accelerator.clip_grad_norm_``. accelerate 1.15 handles the DTensors of each mesh
    separately, and treats every plain tensor as a whole one."""
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise NotApplicable("clipping: accelerate needs accelerate") from error
    on_cpu = not any(p.is_cuda for p in parameters)
    norm: Optional[Any] = Accelerator(cpu=on_cpu).clip_grad_norm_(parameters, limit)
    if norm is None:
        raise NotApplicable("accelerate returned no gradient norm")
    return float(norm.full_tensor() if distributed(norm) else norm)
