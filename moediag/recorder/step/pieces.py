"""Which part of a parameter this rank holds, on which axes of a mesh, and who else holds it.

:func:`axes_of` reads one DTensor; the rest follows from it. Elements are found by torch's own
placement code: the local part of ``arange(numel)``, distributed like the parameter, identifies
every element, for any placement (strided, uneven, several mesh axes) without special cases here.
A plain tensor says nothing of itself. Nothing here communicates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch

from moediag.recorder.not_applicable import NotApplicable

WHOLE, BOX, FLAT, ELEMENTS = "whole", "box", "flat", "elements"


class MeshAxis(NamedTuple):
    """What one axis of a DTensor's mesh does to it."""

    name: str  # "": the mesh has no names
    size: int
    at: Optional[int]  # this rank's coordinate; None outside the mesh
    placed: Any  # torch's placement
    dim: Optional[int]  # the tensor's dim that the axis divides; None: it divides none
    strided: bool  # it divides what inner axes have left, although it is an outer one


@dataclass(frozen=True)
class Where:
    """The part of a whole tensor that a local tensor is."""

    kind: str  # WHOLE, BOX, FLAT or ELEMENTS
    shape: Tuple[int, ...]  # of the whole tensor
    at: Any = None  # BOX: first index by dim; FLAT: first element; ELEMENTS: their numbers

    def cut(self, whole: torch.Tensor, local: Tuple[int, ...]) -> torch.Tensor:
        """Returns the part of ``whole``, whose local shape is ``local``."""
        if self.kind == BOX:
            for dim, (first, size) in enumerate(zip(self.at, local)):  # noqa: B905 - Python 3.9
                whole = whole.narrow(dim, first, size)
            return whole
        if self.kind == FLAT:
            return whole.reshape(-1)[self.at : self.at + local[0]]
        if self.kind == ELEMENTS:
            return whole.reshape(-1)[self.at.reshape(-1)].reshape(local)
        return whole

    def positions(self, local: Tuple[int, ...]) -> torch.Tensor:
        """Returns the position of each element of a part of shape ``local`` in the flattened
        whole."""
        if self.kind == ELEMENTS:
            return torch.as_tensor(self.at)
        if self.kind != BOX:
            return torch.arange(math.prod(local)) + (self.at if self.kind == FLAT else 0)
        found, stride = torch.zeros((), dtype=torch.int64), 1
        for dim in reversed(range(len(local))):
            line = (torch.arange(local[dim]) + self.at[dim]) * stride
            found = found + line.view(-1, *(1,) * (len(local) - 1 - dim))
            stride *= self.shape[dim]
        return found

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Writes ``part`` to its place in ``whole``, which is contiguous."""
        if self.kind == ELEMENTS:
            whole.view(-1)[self.at.reshape(-1)] = part.reshape(-1)
        else:
            self.cut(whole, tuple(part.shape)).copy_(part)


def distributed(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def held(tensor: Any) -> Any:
    """Returns the tensor that this rank holds, by no operation that a dispatch mode or autograd
    would see: of a DTensor its local tensor, a plain tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def local(tensor: Any) -> torch.Tensor:
    """Returns this rank's part, without its history. It shares the memory of ``tensor``."""
    result: torch.Tensor = held(tensor).detach()
    return result


class GradientMark:
    """The gradient of a parameter, None or not, as it is now. It is kept, so that no later one has
    its place in memory."""

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter
        self._gradient = parameter.grad
        self._version = self._read()

    def _read(self) -> int:
        return -1 if self._gradient is None else local(self._gradient)._version

    def unchanged(self) -> bool:
        """Whether nothing replaced or wrote it since."""
        return self.parameter.grad is self._gradient and self._read() == self._version


def placed_alike(one: Any, other: Any) -> bool:
    """Whether two tensors are both plain, or DTensors with the same placements: a gradient that is
    still to be reduced is not placed like its parameter."""
    return bool(getattr(one, "placements", None) == getattr(other, "placements", None))


def axes_of(tensor: Any) -> Tuple[MeshAxis, ...]:
    """Returns the axes of a DTensor's mesh in order; () of a plain tensor."""
    if not distributed(tensor):
        return ()
    return axes_on(tensor.device_mesh, tensor.placements, tensor.dim())


def axes_on(mesh: Any, placements: Sequence[Any], dims: int) -> Tuple[MeshAxis, ...]:
    """Returns the axes of ``mesh`` for a tensor of ``dims`` dims with ``placements``."""
    names: Sequence[Any] = mesh.mesh_dim_names or ("",) * mesh.ndim
    here: Sequence[Any] = mesh.get_coordinate() or (None,) * mesh.ndim
    found = []
    for number, placed in enumerate(placements):
        # _StridedShard is not a subclass of Shard in torch 2.13, and its is_shard() is False.
        dim = None if placed.is_partial() else getattr(placed, "dim", None)
        found.append(
            MeshAxis(
                str(names[number] or ""), mesh.size(number), here[number], placed,
                None if dim is None else dim % max(dims, 1), "Strided" in type(placed).__name__,
            )
        )  # fmt: skip
    return tuple(found)


def same_part(mesh: Any, axes: Sequence[MeshAxis]) -> Optional[Tuple[str, Tuple[int, ...]]]:
    """Returns which part of a tensor with ``axes`` this rank holds, as a text that is equal on all
    ranks that hold it, and these ranks; None outside the mesh."""
    if any(axis.at is None for axis in axes):
        return None
    divided = [axis for axis in axes if not axis.placed.is_replicate()]
    place = tuple(slice(None) if axis.placed.is_replicate() else axis.at for axis in axes)
    part = " ".join(f"{axis.placed}={axis.at}/{axis.size}" for axis in divided)
    return part, tuple(sorted(mesh.mesh[place].flatten().tolist()))


def placement(tensor: Any) -> str:
    """Returns ``Shard(0) on ep[2]``, ``Shard(0) on dp_shard[2] x Shard(1) on tp[2]``, or ""."""
    axes = axes_of(tensor)
    return " x ".join(
        f"{_short(axis.placed)} on {axis.name or 'mesh'}[{axis.size}]"
        for axis in axes
        if axis.size > 1 or len(axes) == 1  # an axis of one rank divides nothing
    )


def _short(placed: Any) -> str:
    dim = getattr(placed, "dim", None)
    return type(placed).__name__.lstrip("_") + (f"({dim})" if dim is not None else "")


# ------------------------------------------------------------------------ elements


def index(tensor: Any) -> Optional[torch.Tensor]:
    """Returns the position of each local element in the flattened whole tensor: int64, shape of the
    local part. None for a plain tensor. Raises NotApplicable if torch does not say."""
    if not distributed(tensor):
        return None
    from torch.distributed.tensor import Replicate, distribute_tensor

    whole = torch.arange(tensor.numel(), dtype=torch.int64).view(tensor.shape)
    whole = whole.to(tensor.device_mesh.device_type)
    # An unreduced sum has the whole shape on every rank, like a copy.
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    try:
        placed: Any = distribute_tensor(whole, tensor.device_mesh, placements, src_data_rank=None)
    except TypeError:  # torch < 2.7 has no src_data_rank, but chunks alone need none
        return _chunks(whole, axes_of(tensor))
    return local(placed).cpu()


def _chunks(whole: torch.Tensor, axes: Sequence[MeshAxis]) -> torch.Tensor:
    """Cuts plain shards: each mesh axis cuts what the previous ones left, like torch.chunk."""
    if any(axis.strided for axis in axes):
        raise NotApplicable(f"torch {torch.__version__} cannot tell where a strided shard lies")
    part = whole
    for axis in axes:
        if axis.dim is not None and axis.at is not None:
            pieces = torch.chunk(part, axis.size, dim=axis.dim)
            part = pieces[axis.at] if axis.at < len(pieces) else part.narrow(axis.dim, 0, 0)
    return part.cpu()


def lines(tensor: Any) -> List[List[int]]:
    """Returns the indices of the whole along each dim that a DTensor's local part has; [] of a
    plain tensor. How one dim is divided never depends on another, so one line through the part is
    sufficient."""
    positions = index(tensor)
    return [] if positions is None else _lines(positions, tuple(tensor.shape))


def _lines(positions: torch.Tensor, shape: Tuple[int, ...]) -> List[List[int]]:
    if not positions.numel():
        return [[] for _ in shape]
    found: List[List[int]] = []
    stride = 1
    for dim in reversed(range(len(shape))):
        line = positions.movedim(dim, 0).reshape(positions.shape[dim], -1)[:, :1].reshape(-1)
        found.insert(0, (line // stride % shape[dim]).tolist())
        stride *= shape[dim]
    return found


def where(tensor: Any) -> Where:
    """Returns the place of this rank's part. A plain tensor is taken as the whole. Raises
    NotApplicable if torch does not say."""
    shape = tuple(tensor.shape)
    positions = index(tensor)
    if positions is None:
        return Where(WHOLE, shape)
    along = _lines(positions, shape)
    if all(line == list(range(line[0], line[-1] + 1)) for line in along if line):
        return Where(BOX, shape, tuple(line[0] if line else 0 for line in along))
    return Where(ELEMENTS, shape, positions)


def plain_piece(whole: torch.Tensor, shape: Sequence[int], at: Optional[int]) -> torch.Tensor:
    """Returns the part of ``whole`` that a plain tensor of ``shape`` is: if it is smaller along one
    dimension, the ``at``-th of equal pieces. Returns ``whole`` itself if that is impossible (``at``
    None, other shapes, no such piece)."""
    if at is None or whole.ndim != len(shape):
        return whole
    cut = [dim for dim, size in enumerate(shape) if size != whole.shape[dim]]
    if len(cut) != 1 or (at + 1) * shape[cut[0]] > whole.shape[cut[0]]:
        return whole
    return whole.narrow(cut[0], at * shape[cut[0]], shape[cut[0]])


def flat_parameters(handle: Any) -> Tuple[Any, ...]:
    """Returns what an optimizer may have of an FSDP1 handle: its flat parameter, and the original
    ones if it uses them."""
    return (handle.flat_param, *(handle.flat_param._params or ()))
