"""Programs that train on, each with one silent error that a law finds, and their healthy twin.

    torchrun --nproc-per-node 2 tests/victims/law_jobs.py lr_by_rank

``HERE`` marks the line of the error.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS = 7


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(bug: str, rank: int) -> None:
    """Data-parallel training on one labelled set of samples."""
    torch.manual_seed(1)
    samples = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
    sampler = None if bug == "no_sampler" else DistributedSampler(samples)  # HERE no_sampler
    loader = DataLoader(samples, batch_size=8, sampler=sampler)
    wrapped = DistributedDataParallel(model())
    if bug == "load_on_rank_0" and rank == 0:
        torch.manual_seed(5)
        other = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        wrapped.module.load_state_dict(other.state_dict())  # HERE load_on_rank_0
    lr = 1e-2 * (2 if bug == "lr_by_rank" and rank == 1 else 1)  # HERE lr_by_rank
    decay = 0.1 if bug == "decay_by_rank" and rank == 1 else 0.0  # HERE decay_by_rank
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=lr, weight_decay=decay)
    done = 0
    for epoch in range(4):
        if sampler is not None and bug != "no_set_epoch":  # HERE no_set_epoch
            sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(inputs), labels).backward()
            optimizer.step()
            if bug == "extra_step" and rank == 1 and done == 3:
                optimizer.step()  # HERE extra_step
            done += 1
            if bug != "no_set_epoch" and done == STEPS:
                return


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    train(sys.argv[1], int(os.environ["RANK"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
