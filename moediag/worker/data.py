"""The batches of every rank: a function of (seed, rank, step, micro-batch) alone, so that the
single-process reference sees exactly what the ranks saw."""

from __future__ import annotations

import torch

from moediag.protocol import ModelSpec, SkewSpec, StepSpec


def batch(
    model: ModelSpec, step: StepSpec, skew: SkewSpec, rank: int, number: int, micro: int
) -> torch.Tensor:
    """Token ids, int64, shape (batch, seq_len). ``number`` is the training step from 1.

    ``skew.batches``: ``distinct`` random tokens a rank; ``identical`` rank 0's on all ranks;
    ``one-token`` a single token repeated, another one on each rank, which hits exactly top-k
    experts in each layer without any patch.
    """
    # The last ten ids are the special tokens of multimodal families, see models._special.
    usable = model.vocab - 10
    if skew.batches == "one-token":
        token = (7 + 11 * rank) % usable
        return torch.full((step.batch, step.seq_len), token, dtype=torch.int64)
    source = 0 if skew.batches == "identical" else rank
    generator = torch.Generator().manual_seed(
        step.seed * 1_000_003 + source * 10_007 + number * 101 + micro
    )
    return torch.randint(
        0, usable, (step.batch, step.seq_len), generator=generator, dtype=torch.int64
    )
