"""The tensors of one rank on disk, and whole tensors put together from those of all ranks;
whether the disk has room for them."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from moediag.protocol import MeasureRequest
from moediag.ranks.verify.model_pieces import Piece
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step.pieces import WHOLE, Where

_RUNS = 4  # the distributed run and three of the reference, each about as large together


@dataclass(frozen=True)
class Stored:
    """One rank's part of one tensor."""

    where: Where
    tensor: Optional[torch.Tensor]  # None: the parameter has no gradient
    placement: str = ""
    trainable: bool = True
    buffer: bool = False


Tensors = Dict[str, Stored]


def save(path: Path, groups: Dict[str, Tensors]) -> None:
    """Writes groups of tensors atomically."""
    content = {name: {n: _plain(one) for n, one in group.items()} for name, group in groups.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    torch.save(content, temporary)
    temporary.replace(path)


def load(path: Path) -> Dict[str, Tensors]:
    """Reads what :func:`save` wrote. Raises OSError if it does not exist."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    return {name: {n: _stored(one) for n, one in group.items()} for name, group in content.items()}


def _plain(one: Stored) -> List[Any]:
    where = one.where
    at = list(where.at) if isinstance(where.at, tuple) else where.at
    kept = one.tensor if one.tensor is None else one.tensor.detach().cpu().clone()
    return [where.kind, list(where.shape), at, kept, one.placement, one.trainable, one.buffer]


def _stored(raw: List[Any]) -> Stored:
    kind, shape, at, tensor, placement, trainable, buffer = raw
    where = Where(kind, tuple(shape), tuple(at) if isinstance(at, list) else at)
    return Stored(where, tensor, placement, trainable, buffer)


def whole(parts: Iterable[Stored]) -> Tuple[Optional[torch.Tensor], str]:
    """Puts one tensor together from the ranks' parts. Returns None and why that is impossible."""
    present = [part for part in parts if part.tensor is not None]
    if not present:
        return None, "no rank has it"
    shapes = {part.where.shape for part in present}
    if len(shapes) > 1:
        listed = ", ".join(str(list(shape)) for shape in sorted(shapes))
        return None, f"ranks hold it in several shapes ({listed})"
    first = present[0]
    assert first.tensor is not None
    result = torch.zeros(first.where.shape, dtype=first.tensor.dtype)
    covered = torch.zeros(first.where.shape, dtype=torch.bool)
    for part in present:
        tensor = part.tensor
        assert tensor is not None
        local = tuple(tensor.shape)
        if tensor.numel() == 0:
            continue
        if part.where.kind == WHOLE and local != part.where.shape:
            return None, "its parts are not where they say"
        before = part.where.cut(covered, local)
        if bool(before.any()):
            other = part.where.cut(result, local)
            if not _equal(other[before], tensor[before]):
                return None, "ranks hold different values of it"
        part.where.put(result, tensor)
        part.where.put(covered, torch.ones(local, dtype=torch.bool))
    if not bool(covered.all()):
        return None, "a part of it is on no rank"
    return result, ""


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the values are equal; a nan equals a nan."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def needed(found: Sequence[Piece], steps: int) -> int:
    """Returns the bytes that this rank writes: its tensors at the start, and its gradients and
    weights after each step."""
    tensors = [(p.read(), p.owner is not None) for p in found]
    start = sum(t.numel() * t.element_size() for t, _ in tensors)
    trained = sum(t.numel() * t.element_size() for t, of_parameter in tensors if of_parameter)
    return start + 2 * steps * trained


def enough_room(found: Sequence[Piece], request: MeasureRequest, alone: bool) -> None:
    """Raises NotApplicable if the ranks of this machine would fill the disk. ``alone``: this is the
    only rank."""
    folder = Path(request.folder)
    ranks = 1 if alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    wanted, free = needed(found, request.steps) * ranks * _RUNS, shutil.disk_usage(folder).free
    if wanted > free:
        raise NotApplicable(
            f"the measurements take up to {wanted / 1e9:.1f} GB of disk, and {folder} has "
            f"{free / 1e9:.1f} GB free; give --out on another disk, or a smaller model"
        )
