"""The batches of every rank, a function of (seed, rank, step, micro-batch) alone, so that the
single-process reference sees exactly what the ranks saw."""

from __future__ import annotations

import torch

from moediag.axes import Layout
from moediag.protocol import Trial


def batch(trial: Trial, rank: int, number: int, micro: int) -> torch.Tensor:
    """Returns token ids, int64, shape (batch, seq_len). ``number`` is the training step from 1.

    ``skew.batches``: ``distinct`` random tokens per rank; ``identical`` rank 0's on all ranks;
    ``per-replica`` the same on all ranks that share one copy of the model; ``one-token`` a single
    repeated token, different on each rank, which reaches exactly top-k experts in each layer
    without a patch; ``repeated`` rank 0's first micro-batch everywhere. The axes of the layout
    decide which ranks share a batch in each case.
    """
    model, step, skew = trial.model, trial.step, trial.skew
    # The last ten ids are the special tokens of multimodal families, see models._special.
    usable = model.vocab - 10
    source = Layout.resolve(trial.layout, trial.world_size).batch_source(rank, skew.batches)
    if skew.batches == "one-token":
        token = (7 + 11 * source) % usable
        return torch.full((step.batch, step.seq_len), token, dtype=torch.int64)
    micro = 0 if skew.batches == "repeated" else micro
    generator = torch.Generator().manual_seed(
        step.seed * 1_000_003 + source * 10_007 + number * 101 + micro
    )
    return torch.randint(
        0, usable, (step.batch, step.seq_len), generator=generator, dtype=torch.int64
    )
