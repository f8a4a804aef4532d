"""Steps of a mixture-of-experts model with expert parallelism by hand: each rank has one of two
parts of the experts. Each case is one step inside ``moediag.verify.step``, with one fault or none.

    torchrun --nproc-per-node 4 moe_steps.py FOLDER CASE...

A case is WAY:FAULT. Rank 0 writes the verdict and cause of each to FOLDER/found.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from moediag import verify
from moediag.launch import comparing
from moediag.ranks.verify import comparison

EXPERTS, HIDDEN, VOCAB, EP = 4, 8, 20, 2
SAMPLES, LENGTH, MICRO = 4, 7, 2  # of one rank; micro-batches of a step
CLIP = 0.05


class Gather(torch.autograd.Function):
    """All ranks' rows, and each rank's gradient summed."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.size = group, len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        first = dist.get_rank(ctx.group) * ctx.size
        return total[first : first + ctx.size], None


class SumOwn(torch.autograd.Function):
    """The sum over ranks of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = rows.contiguous().clone()
        dist.all_reduce(total, group=group)
        own = len(rows) // dist.get_world_size(group)
        return total[dist.get_rank(group) * own :][:own].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        own = gradients[0].contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, own, group=ctx.group)
        return torch.cat(parts), None


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = 0  # the first expert of this rank
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 12) * 0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 12, HIDDEN) * 0.5)

    def keep(self, part: int, parts: int) -> None:
        size = EXPERTS // parts
        self.first = part * size
        for name in ("w1", "w2"):
            whole = getattr(self, name)
            setattr(self, name, nn.Parameter(whole.detach()[self.first : self.first + size]))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        own = weights[:, self.first : self.first + len(self.w1)]
        hidden = F.silu(torch.einsum("th,ehf->tef", x, self.w1))
        return torch.einsum("tef,efh,te->th", hidden, self.w2, own)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.group: Any = None  # of expert parallelism
        self.fault = ""

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        x = self.embed(tokens)
        scores = self.router(x).softmax(-1)
        top = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, top.indices, top.values)
        flat, own = x.flatten(0, 1), weights.flatten(0, 1)
        if self.group is None:
            mixed = self.experts(flat, own)
        else:
            own = own.detach() if self.fault == "router-lost" else own
            mixed = self.experts(Gather.apply(flat, self.group), Gather.apply(own, self.group))
            mixed = SumOwn.apply(mixed, self.group)
        return self.head(x + mixed.view_as(x)), self._balance(scores, weights, attention_mask)

    def _balance(self, scores: Any, weights: Any, mask: torch.Tensor) -> torch.Tensor:
        """A loss per sequence: that of a batch is the mean over its sequences."""
        kept = torch.ones_like(mask) if self.fault == "padding" else mask
        count = kept.sum(1, keepdim=True)
        used = ((weights.detach() > 0) * kept[..., None]).sum(1) / count
        mean = (scores * kept[..., None]).sum(1) / count
        return EXPERTS * (used * mean).sum(-1).mean()


def targets(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["tokens"][:, 1:].masked_fill(batch["mask"][:, 1:] == 0, -100)


def parts(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The cross-entropy summed over tokens, and the balance loss."""
    logits, balance = model(batch["tokens"], attention_mask=batch["mask"])
    right = targets(batch).flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), right, reduction="sum"), balance


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What one process trains on: the mean over all tokens."""
    entropy, balance = parts(model, batch)
    return entropy / (targets(batch) != -100).sum() + balance


def build(fault: str = "") -> Model:
    torch.manual_seed(0)
    model = Model()
    model.fault = fault
    return model


def batch_of(rank: int) -> dict[str, torch.Tensor]:
    """Sequences of different lengths: ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(10 + rank)
    tokens = torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.tensor([[3 + rank, 3], [4, 3 + rank]]).flatten()
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"tokens": tokens * mask, "mask": mask}


def cut(batch: dict[str, torch.Tensor], rows: slice, ep: Any) -> dict[str, torch.Tensor]:
    """A micro-batch, padded to the longest sequence of the ranks that share experts."""
    longest = batch["mask"][rows].sum(1).max()
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=ep)
    return {name: tensor[rows, : int(longest)] for name, tensor in batch.items()}


def divided(model: Model, way: str, ep: Any, replicas: Any) -> nn.Module:
    model.experts.keep(dist.get_rank(ep), EP)
    model.group = ep
    if way == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        given = {"use_orig_params": True, "device_id": torch.device("cpu")}
        inner: Any = FSDP(model.experts, process_group=replicas, **given)
        model.experts = inner
        return FSDP(model, **given)
    names = [name for name, _ in model.named_parameters() if "experts" in name]
    wrapper: Any = nn.parallel.DistributedDataParallel
    wrapper._set_params_and_buffers_to_ignore_for_model(model, names)
    return wrapper(model)  # type: ignore[no-any-return]


def backward(model: nn.Module, batch: dict[str, torch.Tensor], fault: str, ep: Any) -> None:
    world = dist.get_world_size()
    count = (targets(batch) != -100).sum()
    own = count.clone()
    dist.all_reduce(count)
    for begin in range(0, SAMPLES, SAMPLES // MICRO):
        micro = cut(batch, slice(begin, begin + SAMPLES // MICRO), ep)
        entropy, balance = parts(model, micro)
        balance = balance / MICRO
        entropy = entropy / own if fault == "mean-per-rank" else entropy * world / count
        if fault == "balance-times-micro":
            balance = balance * MICRO
        if fault == "balance-times-ranks":
            balance = balance * world
        total = entropy + balance
        (total / MICRO if fault == "divided-twice" else total).backward()


def clipped(model: nn.Module, own: list[nn.Parameter], fault: str, ep: Any) -> None:
    """Clips by the norm of all parameters: the experts' are on several ranks."""
    others = [p.grad for p in model.parameters() if all(p is not one for one in own)]
    square = torch.nn.utils.get_total_norm(others) ** 2
    if fault != "norm-without-experts":
        of_experts = torch.nn.utils.get_total_norm([p.grad for p in own]) ** 2
        dist.all_reduce(of_experts, group=ep)
        square = square + of_experts
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, square.sqrt())


def check(folder: Path, case: str, ep: Any, replicas: Any) -> dict[str, Any]:
    way, fault = case.split(":")
    plain = build(fault)
    model = divided(plain, way, ep, replicas)
    own = [p for name, p in model.named_parameters() if "experts" in name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = batch_of(dist.get_rank())
    reference = lambda: build(fault)  # noqa: E731 - the same model, with its fault
    out = folder / case.replace(":", "-")
    clip = CLIP if fault in ("clipped", "norm-without-experts") else None
    with verify.step(
        model, optimizer, reference=reference, loss=loss, batch=batch, clip=clip, out=out
    ) as found:
        backward(model, batch, fault, ep)
        for parameter in own:
            if parameter.grad is None:
                continue
            if way == "ddp":
                dist.all_reduce(parameter.grad, group=replicas)
                parameter.grad /= dist.get_world_size(replicas)
            if fault != "experts-times-ep":
                parameter.grad /= EP
        if clip is not None:
            clipped(model, own, fault, ep)
        optimizer.step()
    return {"verdict": found.verdict, "cause": found.cause, "not_compared": found.not_compared}


def compared_here(python: str, target: Path, job: Path, references: Sequence[Path]) -> str:
    comparison.compare(job, list(references), target)
    return ""


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    world = dist.get_world_size()
    of_ep = [dist.new_group(list(range(i, i + EP))) for i in range(0, world, EP)]
    of_replicas = [dist.new_group(list(range(part, world, EP))) for part in range(EP)]
    ep, replicas = of_ep[rank // EP], of_replicas[rank % EP]
    if len(sys.argv) > 3:  # a new process for each case would take most of the time
        comparing.compare = compared_here
    found = {case: check(folder, case, ep, replicas) for case in sys.argv[2:]}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
