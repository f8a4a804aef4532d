"""Expert parallelism by hand around a released model: all-to-all before and after its experts.

Every rank keeps its own rows of the experts' 3-D parameters and works on its own batch. A token is
sent to the ranks that hold its experts, computed there by the released class's own forward, and
returned to be weighted and summed. So the gradient of an expert, on the rank that holds it, is the
*sum* over the tokens of all ranks of the ep group: it is not divided by their number.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch import nn

from moediag.axes import EP
from moediag.lab.step.models.tiny import Anatomy
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step import pieces

NOTE = (
    "expert parallelism by hand: each rank keeps its rows of {} and exchanges tokens by "
    "all-to-all; the experts' own computation, the router and the rest are the released model's"
)


# (what this rank sends, received rows, the expert of each row among this rank's) -> their outputs
Computed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Around = Callable[[Computed], Computed]


def unchanged(computed: Computed) -> Computed:
    return computed


def divide(
    anatomy: Anatomy,
    group: Any,
    empty: str = "released",
    around: Around = unchanged,
    share: float = 1.0,
) -> Dict[str, Tuple[int, int]]:
    """Keeps on each rank of ``group`` its share of every block's experts, in rank order. Returns
    FQN of each expert parameter -> [first, last) of this rank's experts. Local. ``empty``: what a
    rank without tokens returns, an option of fsdp2-two-meshes. ``around`` changes what is computed
    between the exchanges. ``share``: a factor of the gradients of the experts' parameters.

    Raises NotApplicable if experts are not 3-D parameters, or cannot be divided evenly.
    """
    size, at = dist.get_world_size(group), dist.get_rank(group)
    if not anatomy.fused:
        raise NotApplicable("experts are modules in this release, not rows of a parameter")
    if anatomy.experts % size:
        raise NotApplicable(f"{anatomy.experts} experts cannot be divided over {size} ranks")
    count = anatomy.experts // size
    mine = EP.mine(anatomy.experts, at, size, experts=True)
    kept: Dict[str, Tuple[int, int]] = {}
    for block in anatomy.blocks:
        experts: Any = block.module.experts
        for name, parameter in list(experts.named_parameters()):
            rows = parameter.detach()[mine.start : mine.stop].clone()
            setattr(experts, name, nn.Parameter(rows))
            kept[f"{block.fqn}.experts.{name}"] = (mine.start, mine.stop)
        experts.num_experts = count
        local: Any = _Local(experts, share)
        released = functools.partial(type(experts).forward, local)
        computed = functools.partial(_computed, released, local, empty)
        experts.forward = functools.partial(_forward, around(computed), count, group)
    return kept


class _Local:
    """The experts as their released forward sees them: parameters that became DTensors on the ep
    axis are this rank's part, like the rest."""

    def __init__(self, experts: nn.Module, share: float) -> None:
        self._experts = experts
        self._share = share

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        if pieces.distributed(value):
            value = value.to_local()
        scaled = self._share != 1.0 and isinstance(value, torch.Tensor)
        return _Scaled.apply(value, self._share) if scaled else value


def _computed(
    released: Any,
    local: Any,
    empty: str,
    hidden: torch.Tensor,
    rows: torch.Tensor,
    own: torch.Tensor,
) -> torch.Tensor:
    """Returns the experts' output for the received ``rows``. ``hidden``: what this rank sends."""
    if rows.shape[0] or empty == "released":
        found: torch.Tensor = released(rows, own, torch.ones_like(own, dtype=rows.dtype))
        return found
    reached = hidden if empty == "from-input" else rows
    zero = sum(0.0 * getattr(local, name).sum() for name, _ in local.named_parameters())
    return reached[:0] + (0.0 * reached.sum() + zero)


def _forward(
    computed: Any,
    count: int,
    group: Any,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Returns (tokens, width). hidden (tokens, width); index and weights (tokens, top_k): each
    token's experts on all ranks, and their weights. Collective in ``group``."""
    tokens, top_k = index.shape
    experts = index.reshape(-1)
    order = torch.argsort(experts // count, stable=True)
    sent = torch.bincount(experts // count, minlength=dist.get_world_size(group))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    there, here = sent.tolist(), received.tolist()
    rows = _exchange(hidden[order // top_k], there, here, group)
    own = _exchange((experts[order] % count).unsqueeze(1), there, here, group)
    back = _exchange(computed(hidden, rows, own), here, there, group)
    in_place = torch.empty_like(order)
    in_place[order] = torch.arange(order.numel(), device=order.device)
    each = back[in_place].view(tokens, top_k, -1)
    return (each * weights.unsqueeze(-1).to(each.dtype)).sum(1)


def _exchange(rows: torch.Tensor, sent: List[int], received: List[int], group: Any) -> torch.Tensor:
    """Sends rows (dim 0) to the ranks of ``group`` in order: ``sent`` is the number for each."""
    result: torch.Tensor = _AllToAll.apply(rows, sent, received, group)
    return result


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.share, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: List[int], received: List[int], group: Any
    ) -> torch.Tensor:
        ctx.back = received, sent, group
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sent, received, group = ctx.back
        out = gradient.new_empty((sum(received), *gradient.shape[1:]))
        dist.all_to_all_single(out, gradient.contiguous(), received, sent, group=group)
        return out, None, None, None
