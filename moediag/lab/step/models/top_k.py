"""Replaces the choice of experts: every router calls ``torch.topk`` over as many scores."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Optional

import torch

Best = Callable[[torch.Tensor], torch.Tensor]  # the indices of the largest of other scores
# Returns the chosen indices, from the scores, how many to choose, and Best; None: as released.
Choose = Callable[[torch.Tensor, int, Best], Optional[torch.Tensor]]


@contextmanager
def chosen_by(experts: int, choose: Choose) -> Iterator[None]:
    """Lets ``choose`` choose wherever a top-k over ``experts`` scores is taken. Values stay those
    of the scores themselves."""
    originals: Dict[Any, Any] = {torch: torch.topk, torch.Tensor: torch.Tensor.topk}
    for owner, original in originals.items():
        owner.topk = _bent(original, experts, choose)
    try:
        yield
    finally:
        for owner, original in originals.items():
            owner.topk = original


def _bent(original: Any, experts: int, choose: Choose) -> Any:
    def topk(scores: torch.Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
        indices = None
        if scores.shape[-1] == experts and dim in (-1, scores.dim() - 1):
            indices = choose(scores, k, lambda by: original(by, k, dim, *args, **kwargs)[1])
        if indices is None:
            return original(scores, k, dim, *args, **kwargs)
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    return topk
