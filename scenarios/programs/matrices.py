"""The models of programs that test the training loop: matrices, each an FSDP2 group of its own, and
the same in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn

from moediag.axes import DP_SHARD
from moediag.lab.step.collector import Collector
from moediag.lab.step.shard import fsdp2_internals
from moediag.lab.step.shard.declared_slices import PlainShards
from moediag.protocol import Applied, GradientError, Trial
from moediag.protocol.names import clean_fqn
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step import pieces
from moediag.recorder.step.tensor_error import Tolerance

FEATURES, WIDTH, SAMPLES = 12, 16, 6
LR = 1e-2
# Largest |difference| of weights, as a share of the largest movement in training, and of gradients,
# as a share of the parameter's largest. Muon orthogonalises in bfloat16, whose products are summed
# in another order on shards: healthy runs differ by up to 7e-2 and 1e-3, a step on zeros by 5e-1
# and 3e-2.
MOVED, MOVED_FP32 = {"muon": 2e-1}, 1e-3
GRADIENT = {"muon": 2e-2}

Batch = Tuple[torch.Tensor, torch.Tensor]


class Matrices(nn.Module):
    """``first`` (WIDTH, FEATURES), ``middle`` (WIDTH, WIDTH), ``last`` (FEATURES, WIDTH)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH, bias=False)
        self.middle = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, FEATURES, bias=False)
        fill(self, seed)

    def forward(self, inputs: torch.Tensor, overflow_row: Optional[int] = None) -> torch.Tensor:
        """Maps fp32 (samples, FEATURES) to the same. ``overflow_row``: of the first matrix, whose
        gradient overflows; nothing else does, since the inputs need no gradient."""
        hidden = self.first(inputs)
        if overflow_row is not None and hidden.requires_grad:
            hidden.register_hook(lambda gradient: _overflowed(gradient, overflow_row))
        result: torch.Tensor = self.last(torch.tanh(self.middle(torch.tanh(hidden))))
        return result


def fill(model: nn.Module, seed: int) -> None:
    """Draws all parameters of ``model``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / WIDTH**0.5)


def trained(loss: torch.Tensor, share: int = 1) -> torch.Tensor:
    """Runs backward of a ``share``-th of ``loss``, and returns it without history."""
    (loss / share).backward()
    return loss.detach()


def _overflowed(gradient: torch.Tensor, column: int) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[:, column] = float("inf")
    return gradient


def sharded(trial: Trial, device: torch.device, **options: Any) -> Matrices:
    """Shards :class:`Matrices`, see :func:`shard`."""
    model = Matrices(trial.step.seed)
    shard(model, trial, device, **options)
    return model


def shard(model: nn.Module, trial: Trial, device: torch.device, **options: Any) -> None:
    """Shards over all ranks, one FSDP2 group per child module. ``options``: of ``fully_shard``.
    Raises NotApplicable."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if fsdp2_internals.sums_for_means(trial.backend):
        raise NotApplicable("FSDP2 on gloo needs torch >= 2.9: before, it adds where it averages")
    mesh = init_device_mesh(device.type, (trial.world_size,), mesh_dim_names=(str(DP_SHARD),))
    model.to(device)
    for module in model.children():
        fully_shard(module, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def batch(trial: Trial, rank: int, number: int, micro: int = 0) -> Batch:
    """Returns inputs and targets, fp32 (SAMPLES, FEATURES), of step ``number`` from 1; depends on
    the arguments alone."""
    seed = trial.step.seed * 1_000_003 + rank * 10_007 + number * 101 + micro
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return inputs, torch.randn(SAMPLES, FEATURES, generator=generator) + 0.5 * rank


def train(
    collector: Collector,
    model: nn.Module,
    backward: Callable[[nn.Module, int, int], torch.Tensor],
    alone: nn.Module,
    right: Callable[[nn.Module, int, int], torch.Tensor],
    clip: Optional[Callable[[nn.Module, float], float]] = None,
) -> None:
    """Trains ``model`` on all ranks, and ``alone``, the same model, in one process on the CPU.
    Compares their gradients in each step, and parameters without gradient after it. Collective.

    ``backward(model, rank, number)`` and ``right`` run forward and backward of one rank's batch in
    step ``number`` from 1, and return that rank's loss. The gradient of ``right`` summed over ranks
    defines the correct one. ``clip(model, limit)`` clips on the ranks to the trial's limit, and
    returns the norm before.
    """
    trial, measured = collector.trial, collector.measured
    ranks = range(trial.world_size)
    ours, theirs = (
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=LR)
        for m in (model, alone)
    )
    limit = float("inf") if trial.step.clip is None else trial.step.clip
    start = weights(alone)
    by_hand = [name for name, p in alone.named_parameters() if not p.requires_grad]

    def optimize(number: int) -> None:
        if clip is not None:
            measured.gradient_norms.append(clip(model, limit))
        ours.step()
        ours.zero_grad()
        if by_hand:
            found = compare_weights(model, weights(alone), start, "adamw")
            these = {name: found[name] for name in by_hand if name in found}
            measured.applied[str(number)] = Applied(weights=these)

    for number in collector.steps(Held(model, ours, trial, PlainShards()), optimize):
        truth = sum(float(right(alone, rank, number)) for rank in ranks) / len(ranks)
        expected = gradients(alone)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(alone.parameters(), limit)
            measured.reference_norms.append(float(norm))
        theirs.step()
        theirs.zero_grad()
        measured.losses.append(float(backward(model, collector.rank, number)))
        measured.reference_losses.append(truth)
        measured.gradients[str(number)] = compare_gradients(model, expected)
    dist.barrier()


def gradients(model: nn.Module) -> Dict[str, torch.Tensor]:
    """Returns copies of an unsharded model's gradients, by name."""
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> Dict[str, torch.Tensor]:
    """Returns copies of an unsharded model's weights, by name."""
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def compare_gradients(
    model: nn.Module, expected: Dict[str, torch.Tensor], optimizer: str = "adamw"
) -> Dict[str, GradientError]:
    """Compares this rank's shards with the whole gradients of one process."""
    tolerance = Tolerance.of("float32", list(expected.values()))
    rtol = GRADIENT.get(optimizer, tolerance.rtol)
    tolerance = Tolerance(rtol, tolerance.atol)
    found = {}
    for name, parameter in model.named_parameters():
        fqn = clean_fqn(name)
        if fqn not in expected:
            continue
        local = None if parameter.grad is None else pieces.local(parameter.grad)
        part = _part(parameter, expected[fqn])
        found[fqn] = tolerance.judge(local, part, float(expected[fqn].abs().max()))
    return found


def compare_weights(
    model: nn.Module,
    expected: Dict[str, torch.Tensor],
    start: Dict[str, torch.Tensor],
    optimizer: str,
) -> Dict[str, GradientError]:
    """Compares this rank's shards with the whole weights of one process; the scale is how far those
    have moved from ``start``."""
    moved = {fqn: float((expected[fqn] - start[fqn]).abs().max()) for fqn in expected}
    allowed = MOVED.get(optimizer, MOVED_FP32) * max(moved.values()) + 1e-7
    found = {}
    for name, parameter in model.named_parameters():
        fqn = clean_fqn(name)
        if fqn not in expected:
            continue
        tolerance = Tolerance(0.0, allowed)
        part = _part(parameter, expected[fqn])
        found[fqn] = tolerance.judge(pieces.local(parameter), part, moved[fqn])
    return found


def _part(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    return pieces.where(parameter).cut(whole, tuple(pieces.local(parameter).shape))


@dataclass
class Held:
    """The interface that :class:`moediag.lab.step.measure.replicas.Observer` reads."""

    model: nn.Module
    optimizer: Any
    trial: Trial
    plain_shards: PlainShards
    tells_slices: bool = True
