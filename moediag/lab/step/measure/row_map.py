"""What a tensor holds instead of its part of the checkpoint: rows of another place, the same
elements in another order, or nothing of it."""

from __future__ import annotations

from typing import List, Optional, Sequence

import torch

ABSENT = -1


def describe(
    own: torch.Tensor,
    where: Optional[torch.Tensor],
    whole: torch.Tensor,
    of: str = "the checkpoint",
) -> str:
    """Returns it in words that follow the tensor's name. ``of``: what ``whole`` is.

    ``own``: this rank's part, which differs from the checkpoint's. ``where``: the place of each of
    its elements in ``whole``, the checkpoint's tensor; None if it should be all of it. Empty if
    their sizes differ."""
    if where is None:
        if own.shape != whole.shape:
            return f"has shape {tuple(own.shape)} instead of {tuple(whole.shape)}"
        where = torch.arange(whole.numel()).view(whole.shape)
    if own.shape != where.shape or not own.numel():
        return ""
    whole = whole.to(own.dtype)
    wanted = whole.reshape(-1)[where]
    held = _rows(own, where, whole)
    right = _rows(wanted, where, whole)
    if ABSENT not in held and held != right:
        return f"holds rows {_runs(held)} of {of} where {_runs(right)} belong"
    if torch.equal(own.reshape(-1).sort().values, wanted.reshape(-1).sort().values):
        return "holds its elements in another order"
    found = int(torch.isin(own, whole).sum())
    if not found:
        return "holds no element of the checkpoint's tensor"
    same = int((own == wanted).sum())
    return f"holds {same} of its {own.numel()} elements in their place, {found} in any place"


def permuted(own: torch.Tensor, where: Optional[torch.Tensor], whole: torch.Tensor) -> bool:
    """Whether every row of ``own`` is one of ``whole``. Arguments as of ``describe``."""
    if where is None:
        where = torch.arange(whole.numel()).view(whole.shape)
    return own.shape == where.shape and ABSENT not in _rows(own, where, whole.to(own.dtype))


def _rows(own: torch.Tensor, where: torch.Tensor, whole: torch.Tensor) -> List[int]:
    """Returns, for each local row, the row of ``whole`` that has its elements."""
    if whole.ndim < 2:
        own, where, whole = own.reshape(-1, 1), where.reshape(-1, 1), whole.reshape(-1, 1)
    size = whole[0].numel()
    flat = whole.reshape(-1, size)
    found = []
    for number in range(own.shape[0]):
        places = where[number].reshape(-1)
        equal = (flat[:, places % size] == own[number].reshape(-1)).all(dim=1).nonzero().reshape(-1)
        declared = int(places[0]) // size
        rows = equal.tolist()
        found.append(declared if declared in rows else (rows or [ABSENT])[0])
    return found


def _runs(rows: Sequence[int]) -> str:
    """Returns ``0-3, 8``, in the order of ``rows``."""
    runs: List[List[int]] = []
    for row in rows:
        if runs and row == runs[-1][1] + 1:
            runs[-1][1] = row
        else:
            runs.append([row, row])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
