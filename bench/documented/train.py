"""A plain training program that the documents' `train.py` stands for: one process or ranks of
DistributedDataParallel, which see the same samples; it saves and resumes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--out", type=Path)
parser.add_argument("--resume", type=Path, nargs="?", const=Path())
parser.add_argument("--config")
options = parser.parse_args()

if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
torch.manual_seed(0)
data = torch.randn(4096, 16)
model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
if dist.is_initialized():
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
first = 0
saved = options.out / "ckpt.pt" if options.out else options.resume
if options.resume is not None:
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
for step in range(first, options.steps):
    size = options.batch_size
    begin = step * size * ranks + rank * size
    batch = data[begin : begin + size]
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    if options.out and step == 2 and rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        values = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**values, "step": step + 1}, options.out / "ckpt.pt")
if dist.is_initialized():
    dist.destroy_process_group()
