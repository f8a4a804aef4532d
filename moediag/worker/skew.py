"""Bends routing through the router's top-k, for every family and release.

``torch.topk`` and ``Tensor.topk`` are replaced: where the last dim equals the number of experts,
banned columns are lowered for the *selection* only and the real scores are gathered, so the
gradient of the router is what a model that preferred other experts would have. A TorchFunctionMode
would not do: it is gone when checkpointing recomputes the forward inside backward.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, FrozenSet, Iterator, List

import torch
from torch import nn

from moediag.protocol import SkewSpec
from moediag.worker.models import Anatomy

_BAN = 1e4  # larger than any router score, small enough for bf16


class RouterSkew:
    """The starved experts of one rank: ``set_rank`` and ``set_step`` say whose and when, so that
    the single-process reference can replay every rank in turn."""

    def __init__(self, skew: SkewSpec, experts: int) -> None:
        self._skew = skew
        self._experts = experts
        self._rank = 0
        self._step = 1
        self._layers: List[int] = []
        self._wanted = self._bent_some = False

    @property
    def missed(self) -> bool:
        """Experts were to starve, but no top-k over the experts was seen in those layers."""
        return self._wanted and not self._bent_some

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
        """Patches top-k and marks which decoder layer is running. Undone on exit."""
        if not self._skew.starve:
            yield
            return
        handles: List[Any] = []
        for index, (_, layer) in enumerate(anatomy.layers):
            handles.append(layer.register_forward_pre_hook(self._entering(index)))
            handles.append(layer.register_forward_hook(self._leaving, always_call=True))
        originals: Dict[Any, Any] = {torch: torch.topk, torch.Tensor: torch.Tensor.topk}
        for owner, original in originals.items():
            owner.topk = self._bent(original)
        try:
            yield
        finally:
            for owner, original in originals.items():
                owner.topk = original
            for handle in handles:
                handle.remove()

    def _entering(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._layers.append(index)
            self._wanted = self._wanted or bool(self._banned())

        return hook

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._layers:
            self._layers.pop()

    def _bent(self, original: Any) -> Any:
        def topk(scores: torch.Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
            last = dim in (-1, scores.dim() - 1)
            banned = self._banned() if last and scores.shape[-1] == self._experts else frozenset()
            if not banned:
                return original(scores, k, dim, *args, **kwargs)
            self._bent_some = True
            ban = torch.zeros(self._experts, dtype=scores.dtype, device=scores.device)
            ban[sorted(banned)] = _BAN
            indices = original(scores.detach() - ban, k, dim, *args, **kwargs)[1]
            return torch.return_types.topk((scores.gather(-1, indices), indices))

        return topk
