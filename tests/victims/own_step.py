"""The step of a trial of `moediag run`, inside ``moediag.verify.step`` instead of beside the
reference of moediag's own measurements.

    torchrun --nproc-per-node 2 own_step.py TRIAL.JSON FOLDER SITE-PACKAGES

It runs in the trial's stack; the folder SITE-PACKAGES has what moediag itself needs.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(sys.argv[3])

from moediag import verify
from moediag.axes import Layout
from moediag.lab.step import data, preparation, training
from moediag.lab.step.models import tiny
from moediag.lab.step.models.skew import RouterSkew
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import Trial


def main() -> None:
    trial = Trial.read(sys.argv[1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()

    def build() -> nn.Module:
        return tiny.build(trial.model, trial.step.seed, dtype="float32", experts="eager")

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The mean over the ranks' batches, each with the routing of its rank."""
        anatomy = tiny.anatomy(model, trial.model)
        alone, skew = Wrapped(model, anatomy, trial), RouterSkew(trial.skew, anatomy.experts)
        sources = batch["source"].unique().tolist()
        total = torch.zeros(())
        with skew.installed(anatomy):
            for source in sources:
                skew.set_rank(int(source))
                total = total + alone.loss(batch["tokens"][batch["source"] == source])
        return total / len(sources)

    wrapped = preparation.prepare(trial, torch.device("cpu"))
    skew = RouterSkew(trial.skew, wrapped.anatomy.experts)
    skew.set_rank(rank)
    tokens = data.batch(trial, rank, 1, 0)
    layout = Layout.resolve(trial.layout, trial.world_size)
    source = layout.batch_source(rank, trial.skew.batches)
    batch = {"tokens": tokens, "source": torch.full((len(tokens),), source)}
    with skew.installed(wrapped.anatomy), verify.step(
        wrapped.model, wrapped.optimizer, reference=build, loss=loss, batch=batch,
        clip=trial.step.clip, out=sys.argv[2],
    ):  # fmt: skip
        skew.set_step(1)
        training.forward_backward(wrapped, rank, 1, torch.device("cpu"))
        training.finish(wrapped)


if __name__ == "__main__":
    main()
