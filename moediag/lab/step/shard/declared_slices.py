"""The part of the whole tensor that this rank's piece of a parameter declares to be.

No communication: a DTensor's mesh and placements define it. For plain tensors that hold only some
rows (the experts of transformers' expert parallelism up to 5.15) the wrapper does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

from moediag.recorder.step import pieces

WHOLE = ":"


@dataclass(frozen=True)
class PlainShards:
    """Tensors of which each rank of ``group`` (None: only this rank) holds other rows without a
    placement that says so: plain ones, and DTensors of a mesh without that group's axis.

    ``rows``: FQN -> [first, last) of dim 0 of the whole tensor that this rank holds; of a DTensor,
    those that the ranks of its mesh hold together.
    """

    rows: Dict[str, Tuple[int, int]] = field(default_factory=dict)
    group: Optional[Any] = None


def describe(fqn: str, parameter: Any, plain: PlainShards) -> str:
    """Returns ``"0:4,:,:"``: indices of the whole tensor along each dim, ``":"`` for all of them. A
    piece that is not one range is ``"0:2+4:6"``; the whole tensor is ``":"``."""
    lines = pieces.lines(parameter)
    if lines:
        sizes = list(parameter.shape)
        if fqn in plain.rows:
            lines[0] = [plain.rows[fqn][0] + row for row in lines[0]]
            sizes[0] += 1  # all rows of its mesh are not the whole
        return _text([_span(at, size) for at, size in zip(lines, sizes)])  # noqa: B905 - Python 3.9
    if fqn in plain.rows:
        first, last = plain.rows[fqn]
        return _text([f"{first}:{last}"] + [WHOLE] * (parameter.dim() - 1))
    return WHOLE


def _span(index: List[int], size: int) -> str:
    """Returns consecutive runs joined by "+"."""
    if len(index) == size:
        return WHOLE
    if not index:
        return "0:0"
    runs: List[List[int]] = [[index[0], index[0] + 1]]
    for value in index[1:]:
        if value == runs[-1][1]:
            runs[-1][1] = value + 1
        else:
            runs.append([value, value + 1])
    return "+".join(f"{first}:{last}" for first, last in runs)


def _text(spans: List[str]) -> str:
    return WHOLE if all(span == WHOLE for span in spans) else ",".join(spans)


def holders(parameter: Any, world_size: int) -> int:
    """Returns how many ranks of the world hold this same slice, if all ranks hold some slice."""
    cut = math.prod(axis.size for axis in pieces.axes_of(parameter) if axis.dim is not None)
    return max(world_size // cut, 1)


def mesh_name(parameter: Any) -> str:
    """Returns ``plain``, or ``ep [0, 1]``: a DTensor's mesh dims and its ranks."""
    if not pieces.distributed(parameter):
        return "plain"
    mesh = parameter.device_mesh
    names = ",".join(mesh.mesh_dim_names or ()) or "unnamed"
    return f"{names} {mesh.mesh.tolist()}"
