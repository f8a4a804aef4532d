"""A program of one process without a process group, with one silent error.

python tests/victims/one_process.py NAME

``healthy`` and ``scaler`` have none.
"""

from __future__ import annotations

import sys

import torch
from torch import nn


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))


def train(name: str) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    if name == "other-parameters":
        net = model()
    scaler = torch.amp.GradScaler("cpu", enabled=name.startswith("scaler"))
    for step in range(24):
        batch = torch.randn(4, 8)
        loss = (net(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        if name != "never-clears":
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        if name == "scaler":
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if name == "becomes-nan" and step == 3:
            nn.init.constant_(net[0].bias, float("nan"))  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        if step % 5 == 4:
            net.eval()
            with torch.no_grad():
                net(batch)
            net.train(name != "stays-in-evaluation")


if __name__ == "__main__":
    train(sys.argv[1])
