"""A model that runs its vision tower only if its batch has an image, under FSDP2. The correct
result is one process's: a rank with text only adds nothing to the gradient of the tower."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch
from torch import nn

from moediag.lab.step.collector import Collector
from moediag.recorder.not_applicable import NotApplicable

from . import matrices

OPTIONS: Dict[str, Any] = {
    "text_only": ("odd", "all", "none"),  # ranks without an image
    # What they run instead: nothing; the tower on a blank image, whose output is not used; the
    # tower on an image of 0 patches, whose sum is added; the tower on a blank image, times 0.
    "instead": ("skip", "unused", "empty", "weight-0"),
    "unused_params": False,  # FSDP2 reduces parameters without a gradient as zeros
}

_PIXELS, _PATCHES = 20, 4
_LOOK_ALIKE = (
    "a look-alike of a multimodal model: matrices under FSDP2, one of them the vision tower, whose "
    "output is added to the text's"
)


class Multimodal(nn.Module):
    """``embed`` (WIDTH, FEATURES), ``tower`` (WIDTH, pixels), ``marker`` (WIDTH), which the tower
    adds to the first patch of an image, ``last`` (FEATURES, WIDTH)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed = nn.Linear(matrices.FEATURES, matrices.WIDTH, bias=False)
        self.tower = Tower()
        self.last = nn.Linear(matrices.WIDTH, matrices.FEATURES, bias=False)
        matrices.fill(self, seed)

    def forward(
        self, text: torch.Tensor, image: Optional[torch.Tensor] = None, instead: str = "skip"
    ) -> torch.Tensor:
        """``instead``: what runs without an image, see ``OPTIONS``."""
        hidden = self.embed(text)
        if image is not None:
            hidden = hidden + self.tower(image).mean(0)
        elif instead == "unused":
            self.tower(text.new_zeros(_PATCHES, _PIXELS))
        elif instead == "empty":
            hidden = hidden + self.tower(text.new_zeros(0, _PIXELS)).sum()
        elif instead == "weight-0":
            hidden = hidden + 0.0 * self.tower(text.new_zeros(_PATCHES, _PIXELS)).mean(0)
        result: torch.Tensor = self.last(torch.tanh(hidden))
        return result


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(_PIXELS, matrices.WIDTH, bias=False)
        self.marker = nn.Parameter(torch.empty(matrices.WIDTH))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.patch(image)
        if not image.shape[0]:
            return found  # no first patch to mark
        return torch.cat([found[:1] + self.marker, found[1:]])


def run(collector: Collector) -> None:
    """Runs all steps on this rank. Collective: ends on all ranks, raises, or hangs."""
    trial, options = collector.trial, collector.options

    def without(rank: int) -> bool:
        return options["text_only"] == "all" or (options["text_only"] == "odd" and rank % 2 == 1)

    collector.note(_LOOK_ALIKE)
    collector.recorder.decision("image", not without(collector.rank))
    model, alone = Multimodal(trial.step.seed), Multimodal(trial.step.seed)
    matrices.shard(model, trial, collector.device)
    if options["unused_params"]:
        switch = getattr(model, "set_reduce_scatter_unused_params", None)
        if switch is None:
            raise NotApplicable(
                f"torch {torch.__version__} has no set_reduce_scatter_unused_params"
            )
        switch(True)

    def loss(of: nn.Module, rank: int, number: int, instead: str) -> torch.Tensor:
        device = next(of.parameters()).device
        text, targets = (part.to(device) for part in matrices.batch(trial, rank, number))
        generator = torch.Generator().manual_seed(rank * 10_007 + number)
        image = torch.randn(_PATCHES, _PIXELS, generator=generator).to(device)
        found = of(text, None if without(rank) else image, instead)
        return nn.functional.mse_loss(found, targets)

    def backward(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        return matrices.trained(loss(of, rank, number, options["instead"]))

    def right(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        return matrices.trained(loss(of, rank, number, "skip"), trial.world_size)

    matrices.train(collector, model, backward, alone, right)
