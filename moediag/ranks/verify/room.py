"""Whether the disk has room for the measurements."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Sequence

from moediag.protocol import MeasureRequest
from moediag.ranks.verify.model_pieces import Piece
from moediag.recorder.not_applicable import NotApplicable

_RUNS = 4  # the distributed run and three of the reference, each about as large together


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
