"""Skews routing through the router's top-k, for every family and release.

``torch.topk`` and ``Tensor.topk`` are replaced. If the last dim equals the number of experts,
banned columns are lowered for the *selection* only and the real scores are gathered, so the
router's gradient is that of a model that preferred other experts. A TorchFunctionMode does not
work: it is not active when checkpointing recomputes the forward inside backward.

``routing`` also fixes the experts of every token. Rounding then cannot change a token's experts, so
steps in another precision or with another kernel can be compared closely with a reference.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional

import torch
from torch import nn

from moediag.lab.step.models.tiny import Anatomy
from moediag.protocol import SkewSpec

_BAN = 1e4  # larger than any router score, small enough for bf16
Best = Callable[[torch.Tensor], torch.Tensor]  # the indices of the largest of other scores
# Returns the chosen indices, from the scores, how many to choose, and Best; None: as released.
Choose = Callable[[torch.Tensor, int, Best], Optional[torch.Tensor]]


def routed(routing: str, tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """Returns the experts of each token, int64 (tokens, top_k), distinct within a token.

    ``balanced``: all experts equally often. ``zero-token``: those of even number equally often (all
    but the last if that were fewer than top_k), no token for the others. ``one-hot``: every token
    to the first top_k. A token's experts are alternately close together and far apart: a token with
    all experts on one rank does not show mixed-up ranks, since a normalised pair of scores has no
    gradient if both slots are wrong by the same amount.
    """
    if routing == "one-hot":
        return torch.arange(top_k).expand(tokens, top_k).clone()
    pool = torch.arange(experts)
    if routing == "zero-token":
        pool = pool[::2] if len(pool[::2]) >= top_k else pool[: max(top_k, experts - 1)]
    size = len(pool)
    apart = [d for d in range(1, max(size, 2)) if size // math.gcd(d, size) >= top_k]
    token = torch.arange(tokens)
    distance = torch.tensor(apart)[token // size % len(apart)]
    place = token[:, None] + torch.arange(top_k) * distance[:, None]
    return pool[place % size]


class RouterSkew:
    """The starved experts of one rank. ``set_rank`` and ``set_step`` select the rank and step, so
    that the single-process reference can replay every rank in turn."""

    def __init__(self, skew: SkewSpec, experts: int) -> None:
        self._skew = skew
        self._experts = experts
        self._rank = 0
        self._step = 1
        self._layers: List[int] = []
        self._wanted = self._bent_some = False
        self._made: Dict[Any, torch.Tensor] = {}

    @property
    def missed(self) -> bool:
        """Whether experts should starve, but no top-k over the experts was seen in those layers."""
        return self._wanted and not self._bent_some

    @property
    def applied(self) -> bool:
        """Whether some routing was changed as requested."""
        return self._bent_some

    def set_rank(self, rank: int) -> None:
        self._rank = rank

    def set_step(self, step: int) -> None:
        self._step = step

    def _banned(self) -> FrozenSet[int]:
        if not self._layers:
            return frozenset()
        layer = self._layers[-1]
        return frozenset(
            s.expert
            for s in self._skew.starve
            if (s.rank is None or s.rank == self._rank)
            and (s.layer is None or s.layer == layer)
            and self._step >= s.from_step
        )

    @contextmanager
    def installed(self, anatomy: Anatomy) -> Iterator[None]:
        """Patches top-k and marks the running decoder layer. Undone on exit."""
        if not self._skew.starve and self._skew.routing is None:
            yield
            return
        handles: List[Any] = []
        for index, (_, layer) in enumerate(anatomy.layers):
            handles.append(layer.register_forward_pre_hook(self._entering(index)))
            handles.append(layer.register_forward_hook(self._leaving, always_call=True))
        try:
            with chosen_by(self._experts, self._choose):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._layers.append(index)
            wanted = self._skew.routing is not None or bool(self._banned())
            self._wanted = self._wanted or wanted

        return hook

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._layers:
            self._layers.pop()

    def _routed(self, rows: int, k: int, device: torch.device) -> torch.Tensor:
        """Returns the cached routing: a timed step must not wait for the host."""
        key = (rows, k, device)
        if key not in self._made:
            assert self._skew.routing is not None
            self._made[key] = routed(self._skew.routing, rows, self._experts, k).to(device)
        return self._made[key]

    def _choose(self, scores: torch.Tensor, k: int, best: Best) -> Optional[torch.Tensor]:
        if self._layers and self._skew.routing is not None:
            self._bent_some = True
            shape = (*scores.shape[:-1], k)
            return self._routed(scores.numel() // self._experts, k, scores.device).view(shape)
        banned = self._banned()
        if not banned:
            return None
        self._bent_some = True
        ban = torch.zeros(self._experts, dtype=scores.dtype, device=scores.device)
        ban[sorted(banned)] = _BAN
        return best(scores.detach() - ban)


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
