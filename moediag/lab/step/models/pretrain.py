"""Trains the model before it is saved as a checkpoint, so that fine-tuning starts from a low loss.

The loss of a new model is ln(vocabulary) whatever its experts are, so it hides a lost expert; a
trained model shows it at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moediag.lab.step import data
from moediag.protocol import Trial

_LEARNING_RATE = 1e-2  # a tiny model memorises random batches in some twenty steps


def pretrain(model: nn.Module, trial: Trial) -> None:
    """Runs ``trial.model.pretrain`` steps of AdamW, in place, on all batches at once."""
    steps, ranks, micros = range(trial.step.steps), range(trial.world_size), trial.step.accumulate
    tokens = torch.cat(
        [data.batch(trial, r, n + 1, m) for n in steps for r in ranks for m in range(micros)]
    )
    mask = torch.ones_like(tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    trained: Any = model
    for _ in range(trial.model.pretrain):
        logits = trained(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
        F.cross_entropy(flat, tokens[:, 1:].reshape(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
