"""What the programs beside this file have in common: a model, its samples, and the command line."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH, EXPERTS, ROWS, SAVE_AT, STEPS = 8, 4, 4, 3, 7


class Experts(nn.Module):
    """A layer of experts; the dropout makes training depend on the random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)
        self.drop = nn.Dropout(0.2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weight = self.router(rows).softmax(-1)
        return self.drop(torch.einsum("re,eio,ri->ro", weight, self.up, rows))


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """64 samples, by their number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(100 + at))


class Average:
    """An averaged copy of the weights (EMA)."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, found: dict[str, Any]) -> None:
        self.model.load_state_dict(found)


def loss_of(out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return (out - rows.flip(0)).square().mean()


def permute(experts: torch.Tensor) -> None:
    """Exchanges the first two experts."""
    with torch.no_grad():
        experts[:2] = experts[:2].flip(0).clone()


def given() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fault", default="")
    parser.add_argument("--stage", type=int, default=1)
    found = parser.parse_args()
    found.folder.mkdir(parents=True, exist_ok=True)
    return found
