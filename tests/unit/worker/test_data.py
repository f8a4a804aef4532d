"""Which ranks work on the same batch."""

from __future__ import annotations

import torch

from moediag.lab.step import data
from moediag.protocol import ModelSpec, SkewSpec, Trial


def test_only_replicas_share_their_batch() -> None:
    trial = Trial(
        "t", "s", "v", world_size=4, layout={"dp_shard": 2, "ep": 2}, model=ModelSpec(),
        skew=SkewSpec(batches="per-replica"),
    )  # fmt: skip
    batches = [data.batch(trial, rank, 1, 0) for rank in range(4)]
    assert torch.equal(batches[0], batches[1]) and torch.equal(batches[2], batches[3])
    assert not torch.equal(batches[0], batches[2])


def test_ranks_of_a_tensor_parallel_group_share_every_kind_of_batch() -> None:
    for batches in ("distinct", "per-replica", "one-token"):
        trial = Trial(
            "t", "s", "v", world_size=4, layout={"dp_shard": 2, "tp": 2},
            skew=SkewSpec(batches=batches),
        )  # fmt: skip
        tokens = [data.batch(trial, rank, 1, 0) for rank in range(4)]
        assert torch.equal(tokens[0], tokens[1]) and torch.equal(tokens[2], tokens[3])
        assert not torch.equal(tokens[0], tokens[2])


def test_a_repeated_batch_is_the_same_on_all_ranks_and_in_all_micro_batches() -> None:
    trial = Trial("t", "s", "v", skew=SkewSpec(batches="repeated"))
    first = data.batch(trial, 0, 1, 0)
    assert torch.equal(first, data.batch(trial, 1, 1, 1))
    assert not torch.equal(first, data.batch(trial, 0, 2, 0)), "each step has its own"
