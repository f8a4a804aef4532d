"""Every expert runs in every forward, with an empty slice where it got no token.

An empty matrix product has a zero gradient, not none, so all ranks reduce the same parameters; and
as the expert's forward does run, an expert that is an FSDP group of its own is gathered on every
rank as well. Experts run in index order on all ranks: a hook on each expert first runs the lower
ones that the block skipped. Cost: the empty kernels of the experts without tokens.
"""

from __future__ import annotations

from typing import Any, List, Optional

import torch
from torch import nn

from moediag.lab.step.models.tiny import Anatomy, MoeBlock, add_to_output
from moediag.protocol import WrapperSpec
from moediag.recorder.not_applicable import NotApplicable

SUMMARY = "run every expert in index order, with an empty slice where it got no token"
SOURCE = "NovaSky-AI/SkyRL #1370, and transformers before 4.53.0, which looped over all experts"


def after_wrap(model: nn.Module, anatomy: Anatomy, wrapper: WrapperSpec) -> None:
    if anatomy.fused:
        raise NotApplicable("all experts of this family are one parameter: none can be skipped")
    if wrapper.kind == "fsdp1" and wrapper.granularity == "expert":
        raise NotApplicable("an empty call of an expert would not gather its FSDP1 unit")
    for block in anatomy.blocks:
        _Completion(block).install()


class _Completion:
    """Runs the experts that a forward of ``block`` skips."""

    def __init__(self, block: MoeBlock) -> None:
        self._block = block
        self._experts = [expert for _, expert in block.experts]
        self._next = 0
        self._filling = False
        self._empty: Optional[torch.Tensor] = None
        self._sums: List[torch.Tensor] = []

    def install(self) -> None:
        self._block.module.register_forward_pre_hook(self._enter)
        self._block.module.register_forward_hook(self._leave)
        for index, expert in enumerate(self._experts):
            # Before FSDP's own pre-forward, so that all-gathers come in index order.
            expert.register_forward_pre_hook(self._before(index), prepend=True)

    def _enter(self, block: nn.Module, args: Any) -> None:
        hidden = args[0]
        self._empty = hidden.reshape(-1, hidden.shape[-1])[:0]
        self._next = 0
        self._sums = []

    def _before(self, index: int) -> Any:
        def hook(expert: nn.Module, args: Any) -> None:
            if not self._filling:
                self._run_until(index)
                self._next = index + 1

        return hook

    def _run_until(self, index: int) -> None:
        self._filling = True
        try:
            for expert in self._experts[self._next : index]:
                self._sums.append(expert(self._empty).sum())
        finally:
            self._filling = False

    def _leave(self, block: nn.Module, args: Any, output: Any) -> Any:
        self._run_until(len(self._experts))
        self._next = 0
        self._empty = None
        sums, self._sums = self._sums, []
        return add_to_output(output, torch.stack(sums).sum()) if sums else output
