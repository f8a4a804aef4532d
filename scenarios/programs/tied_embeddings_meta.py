"""A model with tied output layer and embedding weights, made on the meta device, sharded by FSDP2
and loaded from rank 0.

Two names share one Python object. ``to_empty`` on a plain module makes a new parameter for each
name and so silently breaks the tie. FSDP2 then shards two parameters, and whether the second gets
its weights depends on the content of the checkpoint.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, Dict

import torch
import torch.distributed as dist
from torch import nn

from moediag.lab.step import training
from moediag.lab.step.collector import Collector
from moediag.lab.step.measure import ownership
from moediag.lab.step.measure.reference import Right
from moediag.lab.step.models import tiny
from moediag.lab.step.preparation import wrap
from moediag.protocol import Trial
from moediag.protocol.names import clean_fqn
from moediag.recorder.not_applicable import NotApplicable

OPTIONS: Dict[str, Any] = {
    # When the meta model gets memory; before sharding torch's to_empty gives each name its own.
    "empty": ("after-sharding", "before-sharding", "before-sharding-but-rank-0"),
    "retie": ("never", "before-sharding", "after-loading"),
    "checkpoint": ("both-names", "embedding-only"),
    "load": ("torch", "accelerate", "broadcasts"),
}

ZEROED = (
    "memory that was not loaded is zeroed, so that the run repeats: to_empty leaves it as it is"
)
OWN_LOOP = "weights come by a loop of broadcasts over named_parameters, as frameworks write it"


def run(collector: Collector) -> None:
    """Runs all steps of the trial. Raises NotApplicable, and what loading raises."""
    trial, rank, options = collector.trial, collector.rank, collector.options
    right = Right(trial)
    whole: Any = right.model
    names = (_fqn(whole, whole.get_input_embeddings()), _fqn(whole, whole.get_output_embeddings()))
    weights = {name: p.detach().clone() for name, p in whole.named_parameters()}
    if names[1] in weights:
        raise NotApplicable("this model does not tie its embeddings: set tie_word_embeddings")
    checkpoint = dict(weights)
    if options["checkpoint"] == "both-names":
        checkpoint[names[1]] = weights[names[0]]
    model: Any = _on_meta(trial)
    early = options["empty"] == "before-sharding"
    early = early or (options["empty"] == "before-sharding-but-rank-0" and rank != 0)
    if early:
        model.to_empty(device=collector.device)
    if options["retie"] == "before-sharding":
        model.tie_weights()
    wrapped = wrap(model, tiny.anatomy(model, trial.model), trial)
    model.to_empty(device=collector.device)
    wrapped.device = collector.device
    _initialise(model, whole)
    collector.note(*wrapped.notes, ZEROED)
    if options["load"] == "broadcasts":
        collector.note(OWN_LOOP)
    _LOADERS[options["load"]](model, checkpoint if rank == 0 else {}, rank)
    if options["retie"] == "after-loading":
        model.tie_weights()
    wrapped.make_optimizer()
    truth = dict(weights, **{names[1]: weights[names[0]]})
    found = ownership.examine(model, wrapped.anatomy, truth, None)
    collector.recorder.event("weights", keep=True, **ownership.event("loaded", found, trial))
    training.train_beside(collector, wrapped, right)
    even = math.log(trial.model.vocab)
    if abs(collector.measured.losses[0] - even) < 1e-5:
        collector.note(
            f"the loss of step 1 is ln {trial.model.vocab} = {even:.6f}: every token is as likely"
        )
    dist.barrier()


def _fqn(model: nn.Module, module: Any) -> str:
    """Returns the FQN of the module's weight."""
    return next(f"{name}.weight" for name, m in model.named_modules() if m is module)


def _on_meta(trial: Trial) -> nn.Module:
    with torch.device("meta"):
        return tiny.build(trial.model, trial.step.seed)


def _initialise(model: nn.Module, whole: nn.Module) -> None:
    """Copies the buffers of ``whole`` (no checkpoint has them) and zeros every parameter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        buffers = dict(whole.named_buffers())
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[clean_fqn(name)])


# ------------------------------------------------------------------------ loading


def _torch(model: nn.Module, checkpoint: Dict[str, torch.Tensor], rank: int) -> None:
    """Loads by torch.distributed.checkpoint's own function, without requiring every name."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, dict(checkpoint), options=options)


def _accelerate(model: nn.Module, checkpoint: Dict[str, torch.Tensor], rank: int) -> None:
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=rank == 0), model, dict(checkpoint))


def _broadcasts(model: nn.Module, checkpoint: Dict[str, torch.Tensor], rank: int) -> None:
    """Broadcasts each parameter of this rank; those not in the checkpoint stay unchanged."""
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            sharded: Any = parameter
            full = torch.zeros(sharded.shape, dtype=sharded.dtype, device=sharded.device)
            if name in checkpoint:
                full.copy_(checkpoint[name])
            dist.broadcast(full, src=0)
            part = distribute_tensor(full, sharded.device_mesh, sharded.placements)
            sharded.copy_(part)


_LOADERS = {"torch": _torch, "accelerate": _accelerate, "broadcasts": _broadcasts}
