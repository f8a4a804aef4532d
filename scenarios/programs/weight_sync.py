"""After each step a trainer under FSDP2 sends its weights to an inference engine: which names, and
in which order rank 0 gathers and sends. The correct loss of the engine is that of one process's
model after the same steps."""

from __future__ import annotations

from typing import Any, Dict, Iterator, Optional, Tuple

import torch
import torch.distributed as dist

from moediag.lab.step import training
from moediag.lab.step.collector import Collector
from moediag.lab.step.measure.reference import Right
from moediag.lab.step.models import tiny
from moediag.lab.step.preparation import wrap
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import OutcomeTable
from moediag.protocol.names import clean_fqn
from moediag.recorder.step import pieces

from . import fake_engine

OPTIONS: Dict[str, Any] = {
    # Of experts: as transformers 5 packs them; as the checkpoint has them; that, with the
    # halves of gate_up_proj taken for (up, gate).
    "names": ("per-expert", "packed", "per-expert-up-first"),
    "unknown": ("dropped", "refused"),  # by the engine: a name that it does not know
    # What the engine converts after an update: experts that were loaded, or all.
    "converted": ("loaded", "all"),
    # When rank 0 sends a tensor and the engine's rank receives it: as soon as it is gathered,
    # or after all are.
    "sends": ("at-once", "after-gathering"),
    "receives": ("at-once", "after-gathering"),
    "barrier": False,  # of all ranks, after each tensor
}

METRIC = "loss of the engine"
_TABLE = "Parameters of the engine that are not the trainer's"
_COLUMNS = ["step", "parameter", "largest difference"]
_LOOK_ALIKE = (
    "a look-alike of a weight transfer: the inference engine is a fake that knows the engines' "
    "names, in the process of the last rank, and rank 0 sends"
)


def run(collector: Collector) -> None:
    """Runs all steps on this rank. Collective: ends on all ranks, raises, or hangs."""
    trial, options, measured = collector.trial, collector.options, collector.measured
    right = Right(trial)
    model = tiny.build(trial.model, trial.step.seed, experts="eager").to(collector.device)
    wrapped = wrap(model, tiny.anatomy(model, trial.model), trial)
    collector.note(_LOOK_ALIKE, *wrapped.notes)
    last = trial.world_size - 1
    transfer = dist.new_group([0, last])
    engine = fake_engine.Engine(trial, options) if collector.rank == last else None
    table = OutcomeTable(_TABLE, _COLUMNS, [])
    measured.tables.append(table)

    def synchronise(number: int) -> None:
        collector.recorder.phase("weight sync")
        trained = _send(collector, wrapped, engine, transfer)
        found = torch.zeros((), device=collector.device)
        if engine is not None:
            with engine.computing() as model:
                found.fill_(fake_engine.loss(model, trial))
                for name, parameter in model.named_parameters():
                    apart = float((parameter.detach() - trained[name]).abs().max())
                    if apart:
                        table.rows.append([number, name, apart])
        dist.broadcast(found, last)
        measured.metrics[str(number)] = {METRIC: float(found)}
        expected = fake_engine.loss(right.model, trial)
        measured.reference_metrics[str(number)] = {METRIC: expected}

    training.train_beside(collector, wrapped, right, after=synchronise)
    dist.barrier()


def _send(
    collector: Collector, wrapped: Wrapped, engine: Optional[fake_engine.Engine], transfer: Any
) -> Dict[str, torch.Tensor]:
    """Sends all weights of rank 0 to the engine, whose rank receives them. Returns them."""
    options, trained = collector.options, {}
    side = "sends" if collector.rank == 0 else "receives"
    gathered = _gathered(wrapped)
    # A list ends every all-gather before the first tensor is sent, or received.
    for name, whole in list(gathered) if options[side] == "after-gathering" else gathered:
        trained[name] = whole.cpu()
        for known, tensor in fake_engine.named(name, whole.clone(), options["names"]):
            if engine is not None or collector.rank == 0:
                dist.broadcast(tensor, 0, group=transfer)
            if engine is not None:
                engine.load(known, tensor.cpu())
            if options["barrier"]:
                dist.barrier()
    if engine is not None:
        engine.finish()
    return trained


def _gathered(wrapped: Wrapped) -> Iterator[Tuple[str, torch.Tensor]]:
    """Yields whole parameters, one all-gather for each."""
    for name, parameter in wrapped.model.named_parameters():
        sharded: Any = parameter.detach()
        whole = sharded.full_tensor() if pieces.distributed(sharded) else sharded
        yield clean_fqn(name), whole
