"""One MoE block under tensor parallelism, compared with the same block in one process.

The input is a part of the sequence on each rank, as a decoder layer under sequence parallelism
passes it; the loss is the mean of the output times fixed random weights. The comparison covers
every parameter's gradient and the gradient of the block's input, which the layers below receive.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch import nn

from moediag.lab.step.collector import Collector
from moediag.lab.step.measure import gradients
from moediag.lab.step.models.tiny import Anatomy
from moediag.lab.step.shard import optimizers
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import GradientError, Trial
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step import pieces
from moediag.recorder.step.tensor_error import Tolerance

from .router_block import look_alike, titan, titan_cpu
from .router_block.plans import FIXES, Cell

OPTIONS: Dict[str, Any] = {
    "block": ("look-alike", "torchtitan"),
    "tensor_parallel": True,
    "expert_tp": ("tp", "1"),  # routed experts are cut over the tp ranks, or whole on each
    # Routing scores scale what comes out of the experts, or what goes in.
    "scores": ("after", "before"),
    "fix": (  # see router_block.plans
        "none",
        "weights-partial",
        "gate-partial",
        "gate-mean",
        "gate-sum",
        "boundary-twice",
        "merged",
        "boundary",
    ),
}

BLOCK = "layers.0.moe"
_BLOCKS = {"look-alike": look_alike, "torchtitan": titan}
_STD = 0.2  # of weights; scores then differ enough that rounding changes no token's experts


class Layer(nn.Module):
    """The attributes that torchtitan's plan expects of a decoder layer."""

    moe_enabled = True

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = moe


class Model(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": Layer(moe)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer: Any = self.layers["0"]
        out: torch.Tensor = layer.moe(x)
        return out


def run(collector: Collector) -> None:
    """Runs the program. Collective. Raises NotApplicable."""
    trial, options, measured = collector.trial, collector.options, collector.measured
    rank, device = collector.rank, collector.device
    kind: Any = _BLOCKS[options["block"]]
    cell = Cell(options["expert_tp"] == "tp", options["scores"] == "before")
    size = trial.world_size if options["tensor_parallel"] else 1
    _check(trial, size)
    reference = _made(Model(kind.build(trial, cell)), trial).to(device)
    model = copy.deepcopy(reference)
    plan = FIXES[options["fix"]]
    if size > 1:
        kind.parallelize(model, cell, plan, device)
    collector.note(*kind.NOTES)
    if options["block"] == "torchtitan" and not torch.cuda.is_available():
        collector.note(titan_cpu.CPU_NOTE)
    wrapped = Wrapped(model, Anatomy((), (), trial.model.experts), trial)
    wrapped.make_optimizer()
    right = optimizers.build(
        reference.parameters(),
        dataclasses.replace(trial.step, foreach=None, fused=None, parameter_groups="one"),
    )
    broken: List[str] = []

    def optimize(number: int) -> bool:
        if broken:
            collector.note(f"{'; '.join(broken)}: counted as missing, and no optimizer can step")
            return False
        wrapped.step()
        right.step()
        right.zero_grad()
        return True

    for number in collector.steps(wrapped, optimize):
        x, weight = _batch(trial, number, device)
        expected, true_loss = _backward(reference, x, weight, 1)
        began = time.perf_counter()
        part = slice(rank % size * x.shape[1] // size, (rank % size + 1) * x.shape[1] // size)
        mine, loss = _backward(model, x[:, part], weight[:, part], size)
        _reduce(model, plan.afterwards)
        measured.step_seconds.append(time.perf_counter() - began)
        measured.losses.append(loss)
        measured.reference_losses.append(true_loss)
        broken += _drop_broken(model)
        measured.gradients[str(number)] = gradients.compare(wrapped, _gradients(reference))
        measured.inputs[str(number)] = {BLOCK: _judged(mine, expected[:, part], expected)}
    dist.barrier()


def _check(trial: Trial, size: int) -> None:
    model, step = trial.model, trial.step
    if model.dtype != "float32":
        raise NotApplicable("compared in float32 only: rounding sends single tokens elsewhere")
    for what, count in (
        ("step.seq_len", step.seq_len),
        ("model.intermediate", model.intermediate),
        ("model.experts", model.experts),
    ):
        if count % size:
            raise NotApplicable(f"{what} is {count}, which {size} ranks cannot share")


def _made(model: Model, trial: Trial) -> Model:
    """Gives the model the same weights on every rank."""
    generator = torch.Generator().manual_seed(trial.step.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=_STD, generator=generator)
        for buffer in model.buffers():
            buffer.zero_()
    return model


def _batch(trial: Trial, number: int, device: torch.device) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns the block's input and its output's weights, both (batch, sequence, hidden)."""
    generator = torch.Generator().manual_seed(1_000 * (trial.step.seed + 1) + number)
    shape = (trial.step.batch, trial.step.seq_len, trial.model.hidden)
    x, weight = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    return x, weight


def _backward(
    model: nn.Module, x: torch.Tensor, weight: torch.Tensor, size: int
) -> Tuple[torch.Tensor, float]:
    """Runs forward and backward; returns the gradient of ``x`` and the loss. The overall loss is
    the mean of the ranks' losses, so each is divided by the number of ranks, ``size``."""
    x = x.clone().requires_grad_()
    loss = (model(x) * weight).mean()
    (loss / size).backward()
    assert x.grad is not None
    return x.grad, float(loss.detach())


def _reduce(model: nn.Module, how: str) -> None:
    """All-reduces the gate's finished gradient by hand."""
    if not how:
        return
    for name, parameter in model.named_parameters():
        if "router.gate" in name:
            gradient = pieces.local(parameter.grad)  # shares its memory
            dist.all_reduce(gradient)
            if how == "mean":
                gradient /= dist.get_world_size()


def _drop_broken(model: nn.Module) -> List[str]:
    """Removes gradients whose local part does not have the declared shape; returns texts."""
    broken = []
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        if gradient is None or not pieces.distributed(gradient):
            continue
        has = pieces.local(gradient).shape
        if any(p.is_shard() for p in gradient.placements):
            should = pieces.local(parameter).shape
        else:
            should = parameter.shape  # a copy, or a part of a sum: as large as the whole
        if has != should:
            shapes = ("x".join(map(str, shape)) for shape in (has, should))
            broken.append("{} has a gradient of {} where {} belongs".format(name, *shapes))
            parameter.grad = None
    return broken


def _gradients(model: nn.Module) -> Dict[str, Any]:
    return {
        name: None if parameter.grad is None else parameter.grad.detach().float().cpu()
        for name, parameter in model.named_parameters()
    }


def _judged(mine: torch.Tensor, part: torch.Tensor, whole: torch.Tensor) -> GradientError:
    tolerance = Tolerance.of("float32", [whole])
    return tolerance.judge(mine, part.cpu(), float(whole.abs().max()))
