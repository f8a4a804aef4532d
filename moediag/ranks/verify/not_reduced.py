"""Wrong numbers that are right on another rank, in the mean or the sum over ranks, or one element
further: what was not sent, not averaged or not summed, or read at the wrong place."""

from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, Optional

import torch

from moediag.protocol import Applied
from moediag.protocol.outcome import NOT_AVERAGED, NOT_SUMMED, SHIFTED
from moediag.ranks.verify.noise import Noise
from moediag.ranks.verify.tensor_files import Stored, Tensors
from moediag.recorder.step.pieces import WHOLE
from moediag.recorder.step.tensor_error import largest

_ELEMENTS = 16  # of a part that shows a shift
_FURTHEST = 4  # elements of a shift


def not_sent(
    applied: Mapping[int, Applied], rates: Mapping[int, Mapping[str, float]]
) -> Dict[int, List[str]]:
    """Returns by rank its wrong weights that are right on the rank whose optimizer updates them.
    ``rates``: learning rates by parameter, of what each rank's optimizer updates."""
    updated = {
        name
        for rank, own in applied.items()
        for name, one in own.weights.items()
        if name in rates[rank] and not one.wrong
    }
    old = {
        rank: [n for n, one in own.weights.items() if one.wrong and n not in rates[rank]]
        for rank, own in applied.items()
    }
    found = {rank: [name for name in names if name in updated] for rank, names in old.items()}
    return {rank: names for rank, names in found.items() if names}


def not_reduced(
    wrong: Iterable[str],
    of_ranks: Mapping[int, Tensors],
    expected: Mapping[str, Optional[torch.Tensor]],
    measured: Noise,
) -> Dict[str, List[str]]:
    """Returns the ``wrong`` gradients of which the ranks' mean or sum is right, or that are right
    one element further, by which."""
    found: Dict[str, List[str]] = {}
    for name in sorted(wrong) if len(of_ranks) > 1 else ():
        parts = [of.get(name) for of in of_ranks.values()]
        held = [part for part in parts if part is not None]
        tensors = [part.tensor for part in held if part.where.kind == WHOLE]
        right = expected.get(name)
        if right is not None and _shifted(held, right, measured, name):
            found.setdefault(SHIFTED, []).append(name)
        own = [one.float() for one in tensors if one is not None]
        if right is None or len(own) < len(of_ranks) or own[0].shape != right.shape:
            continue
        if all(torch.equal(one, own[0]) for one in own):
            continue
        total, scale = torch.stack(own).sum(0), largest([right])
        for how, value in ((NOT_AVERAGED, total / len(own)), (NOT_SUMMED, total)):
            if float((value - right.float()).abs().max()) <= measured.allowed(name, scale):
                found.setdefault(how, []).append(name)
                break
    return found


def _shifted(parts: List[Stored], right: torch.Tensor, measured: Noise, name: str) -> bool:
    """Whether each element of all parts is that of the element so many after it, or before it."""
    allowed = measured.allowed(name, largest([right]))
    both = [
        (one.tensor.reshape(-1).float(), one.where.cut(right, tuple(one.tensor.shape)).reshape(-1))
        for one in parts
        if one.tensor is not None and one.tensor.numel() >= _ELEMENTS
    ]
    return bool(both) and all(
        any(
            float((a[:-by] - b[by:]).abs().max()) <= allowed
            for by in range(1, _FURTHEST + 1)
            for a, b in ((own, whole), (whole, own))
        )
        for own, whole in both
    )
