"""Activation checkpointing under FSDP2 where the recomputation routes tokens differently.

The correct gradient is that of the computed loss: the routing of the forward, without
checkpointing, in one process.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator

import torch
import torch.distributed as dist

from moediag.lab.step import training
from moediag.lab.step.collector import Collector
from moediag.lab.step.measure.reference import Right
from moediag.lab.step.models import checkpoint, tiny
from moediag.lab.step.models.rerouted import NOTES, Rerouted
from moediag.lab.step.preparation import wrap
from moediag.lab.step.shard import activation_checkpointing
from moediag.protocol import Trial

OPTIONS: Dict[str, Any] = {
    # How routing differs in the recomputation, see moediag.lab.step.models.rerouted.
    "change": ("count", "metadata", "permuted", "noise", "none"),
    "on_rank": 1,  # whose recomputation
    "pair": False,  # permuted: two tokens alone exchange their experts
    "router": ("inside", "outside"),  # of the checkpointed region
    "save": ("nothing", "top-k", "matmul"),  # selective checkpointing: what is not recomputed
    "mutate": False,  # selective checkpointing: what was saved may be written to
    # The released block; one whose router normalises into a new tensor; that, visiting each
    # expert.
    "block": ("released", "not-in-place", "every-expert"),
    "preserve_rng": True,  # checkpointing's own preserve_rng_state
    "unpack": ("strict", "scalar", "zeros"),  # what backward gets for what does not match
}


def run(collector: Collector) -> None:
    """Runs all steps of the trial. Raises NotApplicable, and what a backward raises."""
    trial, rank, options = collector.trial, collector.rank, collector.options
    asked = checkpoint.known(trial.model.experts_implementation)
    model = tiny.build(trial.model, trial.step.seed, experts=asked).to(collector.device)
    anatomy = tiny.anatomy(model, trial.model)
    if options["router"] == "outside":
        activation_checkpointing.router_outside(anatomy)
    else:
        activation_checkpointing.rewritten(anatomy, options["block"])
        activation_checkpointing.enable(model, trial.step.checkpointing, options)
    # Only noise is part of the forward.
    drawn = Rerouted("noise" if options["change"] == "noise" else "none", anatomy.experts)
    right = Right(trial, drawn.installed, lambda of, step: draw_anew(trial, of, step))
    wrapped = wrap(model, anatomy, trial)
    change = Rerouted(options["change"], anatomy.experts, options["pair"])
    collector.note(*wrapped.notes, *filter(None, [NOTES[options["change"]]]))
    here = options["change"] == "noise" or rank == options["on_rank"]

    @contextlib.contextmanager
    def rerouted(number: int) -> Iterator[None]:
        draw_anew(trial, rank, number)
        with change.installed(here):
            yield

    with contextlib.ExitStack() as active:
        tolerance = None
        if options["unpack"] != "strict":
            tolerance = active.enter_context(
                activation_checkpointing.tolerant_unpack(options["unpack"])
            )
        training.train_beside(collector, wrapped, right, rerouted)
    if tolerance is not None and tolerance.replaced:
        collector.note(f"{tolerance.replaced} saved tensors were replaced on rank {rank}")
    dist.barrier()


def draw_anew(trial: Trial, rank: int, number: int) -> None:
    """Seeds the forward of ``rank`` in step ``number``, so that it always draws the same."""
    torch.manual_seed(trial.step.seed * 1_000_003 + rank * 10_007 + number * 101)
