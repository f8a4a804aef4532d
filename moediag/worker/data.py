"""The batches of every rank: a function of (seed, rank, step, micro-batch) alone, so that the
single-process reference sees exactly what the ranks saw."""

from __future__ import annotations

from typing import Dict

import torch

from moediag.protocol import Trial

# Ranks that differ only in these coordinates work on one copy of the model together.
MODEL_AXES = ("pp", "ep", "etp", "tp")


def batch(trial: Trial, rank: int, number: int, micro: int) -> torch.Tensor:
    """Token ids, int64, shape (batch, seq_len). ``number`` is the training step from 1.

    ``skew.batches``: ``distinct`` random tokens a rank; ``identical`` rank 0's on all ranks;
    ``per-replica`` the same on all ranks that differ only along MODEL_AXES; ``one-token`` a single
    token repeated, another one on each rank, which hits exactly top-k experts in each layer
    without any patch.
    """
    model, step, skew = trial.model, trial.step, trial.skew
    # The last ten ids are the special tokens of multimodal families, see models._special.
    usable = model.vocab - 10
    if skew.batches == "one-token":
        token = (7 + 11 * rank) % usable
        return torch.full((step.batch, step.seq_len), token, dtype=torch.int64)
    source = 0 if skew.batches == "identical" else rank
    if skew.batches == "per-replica":
        source = replica(trial.layout, rank)
    generator = torch.Generator().manual_seed(
        step.seed * 1_000_003 + source * 10_007 + number * 101 + micro
    )
    return torch.randint(
        0, usable, (step.batch, step.seq_len), generator=generator, dtype=torch.int64
    )


def replica(layout: Dict[str, int], rank: int) -> int:
    """The lowest rank that works on the same copy of the model. ``layout``: axis -> size,
    outermost first, filled row by row."""
    inner, lowest = 1, 0
    for axis, size in reversed(list(layout.items())):
        coordinate = rank // inner % size
        lowest += 0 if axis in MODEL_AXES else coordinate * inner
        inner *= size
    return lowest
