"""Attention over a sequence that the ranks divide: each gathers the keys and values of all and
attends to one rank's part after the other. The forward is the same in all variants; the backward
differs. The correct result is one process's on the whole sequence."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch import nn

from moediag.lab.step.collector import Collector

from . import matrices

# Attention over a sequence that ranks divide. keys: those that backward attends to, the part
# that is due or the one saved in forward; owners: each rank's share of the gradients of keys
# and values is sent to the ranks that have them, or only its own is kept; autograd: no ring, a
# differentiable all-gather.
OPTIONS: Dict[str, Any] = {
    "ring": ("by-hand", "autograd"),
    "keys": ("saved", "due"),
    "owners": ("sent", "kept"),
}

_EACH = 8  # tokens per rank
_LOOK_ALIKE = (
    "a look-alike of ring attention: one attention layer, its weights on all ranks, its ring "
    "written by hand"
)


class Attention(nn.Module):
    """One head: ``q``, ``k``, ``v`` and ``out``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name in ("q", "k", "v", "out"):
            setattr(self, name, nn.Linear(matrices.WIDTH, matrices.WIDTH, bias=False))
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator) / matrices.WIDTH**0.5)

    def forward(self, x: torch.Tensor, options: Any = None) -> torch.Tensor:
        """Maps (tokens, WIDTH) to the same. ``options``: of the program; None attends to ``x``
        itself."""
        q, k, v = (getattr(self, name)(x) for name in ("q", "k", "v"))
        if options is None:
            mixed = _weights(q, k).softmax(-1) @ v
        elif options["ring"] == "autograd":
            from torch.distributed.nn.functional import all_gather

            k, v = (torch.cat(all_gather(t)) for t in (k, v))
            mixed = _weights(q, k).softmax(-1) @ v
        else:
            mixed = _Ring.apply(q, k, v, options)
        result: torch.Tensor = self.out(mixed)
        return result


def _weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.T / matrices.WIDTH**0.5


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Any
    ) -> torch.Tensor:
        parts = _gathered(k, v)
        lse = torch.logsumexp(torch.stack([_weights(q, k_).logsumexp(-1) for k_, _ in parts]), 0)
        out = sum((_weights(q, k_) - lse[:, None]).exp() @ v_ for k_, v_ in parts)
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, lse)
        assert isinstance(out, torch.Tensor)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        parts = _gathered(k, v)
        rank = dist.get_rank()
        dq, shares = torch.zeros_like(q), []
        for k_, v_ in parts:
            if ctx.options["keys"] == "saved":
                k_, v_ = k, v
            p = (_weights(q, k_) - lse[:, None]).exp()
            dp = grad @ v_.T
            ds = p * (dp - (grad * out).sum(-1, keepdim=True)) / matrices.WIDTH**0.5
            dq += ds @ k_
            shares.append(torch.stack([ds.T @ q, p.T @ grad]))
        if ctx.options["owners"] == "kept":
            return dq, *shares[rank], None
        received = [torch.empty_like(share) for share in shares]
        dist.all_to_all(received, shares)
        return dq, *torch.stack(received).sum(0), None


def _gathered(k: torch.Tensor, v: torch.Tensor) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """Returns the keys and values of every rank, in rank order."""
    own = torch.stack([k, v])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return [(part[0], part[1]) for part in parts]


def run(collector: Collector) -> None:
    """Runs all steps on this rank. Collective."""
    trial, options = collector.trial, collector.options
    collector.note(_LOOK_ALIKE)
    model, alone = Attention(trial.step.seed).to(collector.device), Attention(trial.step.seed)
    wrapped = nn.parallel.DistributedDataParallel(model)
    tokens = _EACH * trial.world_size

    def sequence(rank: int, number: int) -> Tuple[torch.Tensor, torch.Tensor, slice]:
        generator = torch.Generator().manual_seed(trial.step.seed * 10_007 + number)
        x, y = (torch.randn(tokens, matrices.WIDTH, generator=generator) for _ in range(2))
        return x, y, slice(rank * _EACH, (rank + 1) * _EACH)

    def backward(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        x, y, mine = sequence(rank, number)
        x, y = x[mine].to(collector.device), y[mine].to(collector.device)
        return matrices.trained(nn.functional.mse_loss(of(x, options), y))

    def right(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        x, y, mine = sequence(rank, number)
        loss = nn.functional.mse_loss(of(x)[mine], y[mine])
        return matrices.trained(loss, trial.world_size)

    matrices.train(collector, wrapped, backward, alone, right)
