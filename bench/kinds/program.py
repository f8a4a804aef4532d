"""A small model trained on two ranks in one of several ways, written by hand, with or without a
silent error: ``torchrun --nproc-per-node 2 program.py KIND [healthy]``. One process is the
reference: ``python program.py KIND``. The errors are those of ``KINDS`` in ``__main__.py``."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, LENGTH, ROWS, STEPS = 32, 16, 8, 8, 8
KIND = sys.argv[1]
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
FAULTY = WORLD > 1 and sys.argv[2:] != ["healthy"]


def fault(*kinds: str) -> bool:
    return FAULTY and KIND in kinds


class Block(nn.Module):
    """Causal attention and an MLP, both with a norm."""

    def __init__(self, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def attend(self, x: Any, mask: Any = None) -> Any:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None))

    def mlp(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(self.norm2(x))))

    def forward(self, x: Any, mask: Any = None) -> Any:
        x = x + self.attend(x, mask)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, block: Any = Block, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Any, mask: Any = None) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def build(block: Any = Block, **kwargs: Any) -> Model:
    torch.manual_seed(0)
    return Model(block, **kwargs)


def batches() -> Any:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def loss_of(logits: Any, labels: Any, reduction: str = "mean") -> Any:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction)


def mine(tensor: Any, dim: int = 0) -> Any:
    """This rank's part."""
    return tensor.chunk(WORLD, dim)[RANK].contiguous()


def all_reduce(tensor: Any, mean: bool = True) -> None:
    dist.all_reduce(tensor)
    if mean:
        tensor /= WORLD


class Copy(torch.autograd.Function):
    """The same on every rank; gradients are added."""

    @staticmethod
    def forward(_ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Any) -> Any:
        if WORLD > 1 and not fault("tp-input-grad"):
            grad = grad.clone()
            dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    """Adds the ranks' parts."""

    @staticmethod
    def forward(_ctx: Any, x: Any) -> Any:
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_ctx: Any, grad: Any) -> Any:
        return grad


class Gather(torch.autograd.Function):
    """All tokens of a sequence that is split along it; gradients of all ranks are added."""

    @staticmethod
    def forward(_ctx: Any, x: Any) -> Any:
        if WORLD == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(_ctx: Any, grad: Any) -> Any:
        if WORLD > 1 and not fault("cp-kv"):
            grad = grad.clone()
            dist.all_reduce(grad)
        return grad.chunk(WORLD, 1)[RANK]


class TensorParallelBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up.weight, self.up.bias = (nn.Parameter(mine(p.data)) for p in self.up.parameters())
        self.down.weight = nn.Parameter(mine(self.down.weight.data, 1))

    def mlp(self, x: Any) -> Any:
        inside = F.gelu(self.up(Copy.apply(self.norm2(x))))
        if fault("tp-bias"):
            return Sum.apply(self.down(inside))
        return Sum.apply(F.linear(inside, self.down.weight)) + self.down.bias


class TensorParallelEmbedding(nn.Module):
    def __init__(self, whole: nn.Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(mine(whole.weight.data))

    def forward(self, ids: Any) -> Any:
        rows = len(self.weight)
        local = ids - RANK * rows
        outside = (local < 0) | (local >= rows - fault("tp-vocab-mask"))
        found = F.embedding(local.masked_fill(outside, 0), self.weight)
        return Sum.apply(found.masked_fill(outside[..., None], 0.0))


def tensor_parallel() -> None:
    model = build(TensorParallelBlock)
    model.embed = TensorParallelEmbedding(model.embed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    late = None
    for ids, labels in batches():
        loss_of(model(ids), labels).backward()
        if fault("tp-stale"):
            grad = model.embed.weight.grad
            now, grad[:] = grad.clone(), torch.zeros_like(grad) if late is None else late
            late = now
        optimizer.step()
        optimizer.zero_grad()


class Experts(nn.Module):
    """A router and two experts that every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Any) -> Any:
        weights = self.router(x).softmax(-1)
        return sum(weights[..., i : i + 1] * one(x) for i, one in enumerate(self.experts))


class SequenceParallelBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.moe = Experts()

    def attend(self, x: Any, _mask: Any = None) -> Any:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        k, v = Gather.apply(k), Gather.apply(v)
        places = torch.arange(k.shape[1])
        own = mine(places) if WORLD > 1 else places
        return self.out(F.scaled_dot_product_attention(q, k, v, own[:, None] >= places))

    def mlp(self, x: Any) -> Any:
        return super().mlp(x) + self.moe(x)


def sequence_parallel() -> None:
    """Each rank has a part of every sequence; gradients are added over ranks."""
    model = build(SequenceParallelBlock)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for ids, labels in batches():
        loss = loss_of(model(mine(ids, 1)), mine(labels, 1), "sum")
        parts = WORLD if fault("cp-mean") else 1
        loss = loss / (labels.numel() / parts) / (WORLD if fault("cp-scale") else 1)
        loss.backward()
        for name, parameter in model.named_parameters() if WORLD > 1 else ():
            left_out = {"sp-norm": "norm", "sp-router": "router"}.get(KIND, "-")
            if not (FAULTY and left_out in name):
                all_reduce(parameter.grad, mean=False)
        optimizer.step()
        optimizer.zero_grad()


def pipeline() -> None:
    """Rank 0 has the first half, rank 1 the second; one process has both."""
    tied = KIND == "pp-tied"
    whole = build(tied=tied)
    first = nn.ModuleList([whole.embed, *([] if fault("pp-layer") else whole.layers[:1])])
    last = nn.ModuleList([whole.layers[1], whole.norm, whole.head])
    if WORLD == 1:
        optimizer = torch.optim.AdamW(whole.parameters(), 1e-2)
        for ids, labels in batches():
            loss_of(whole(ids), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        return
    stage = (first, last)[RANK]
    optimizer = torch.optim.AdamW(stage.parameters(), 1e-2)
    for ids, labels in batches():
        if RANK == 0:
            x = ids
            for part in stage:
                x = part(x)
            dist.send(x.detach(), 1)
            grad = torch.empty_like(x)
            dist.recv(grad, 1)
            x.backward(grad)
        else:
            x = torch.empty(ROWS, LENGTH, WIDTH)
            dist.recv(x, 0)
            y = x.requires_grad_()
            for part in stage:
                y = part(y)
            loss_of(y, labels).backward()
            dist.send(x.grad, 0)
        if tied and not fault("pp-tied"):
            all_reduce((whole.embed, whole.head)[RANK].weight.grad, mean=False)
        optimizer.step()
        optimizer.zero_grad()


def data_parallel() -> None:
    """By hand: gradients are averaged after the backward."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for ids, labels in batches():
        loss_of(model(mine(ids)), mine(labels)).backward()
        if fault("dp-clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for name, parameter in model.named_parameters() if WORLD > 1 else ():
            if not (fault("dp-layer") and name.startswith("layers.1.down")):
                all_reduce(parameter.grad, mean=not fault("dp-sum"))
        if KIND == "dp-clip" and not FAULTY:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def wrapped() -> None:
    """In DistributedDataParallel."""
    model = build()
    unused = KIND == "ddp-replaced"
    outer = DistributedDataParallel(model, find_unused_parameters=unused) if WORLD > 1 else model
    if fault("ddp-replaced"):
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: max(0.1, 1 - i / 16))
    for ids, labels in batches():
        pieces = list(zip(mine(ids).chunk(2), mine(labels).chunk(2), strict=True))
        for at, (x, y) in enumerate(pieces):
            keep = fault("ddp-no-sync") or at == 0
            called = model if fault("ddp-module") else outer
            with outer.no_sync() if keep and WORLD > 1 else contextlib.nullcontext():
                (loss_of(called(x), y) / len(pieces)).backward()
        optimizer.step()
        for _ in range(WORLD if fault("scheduler") else 1):
            scheduler.step()
        optimizer.zero_grad()


def accumulation() -> None:
    """Micro-batches of unequal numbers of tokens under DistributedDataParallel."""
    model = build()
    outer = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for ids, labels in batches():
        labels = labels.clone()
        labels[:, ROWS // 2 :][1::2] = -100
        total = (labels != -100).sum()
        pieces = list(zip(mine(ids).chunk(2), mine(labels).chunk(2), strict=True))
        kept = [torch.zeros_like(p, dtype=torch.bfloat16) for p in model.parameters()]
        for x, y in pieces:
            if fault("acc-mean"):
                loss = loss_of(outer(x), y) / len(pieces)
            else:
                loss = loss_of(outer(x), y, "sum") * WORLD / total
            loss.backward()
            if fault("acc-bf16"):
                for sums, p in zip(kept, model.parameters(), strict=True):
                    sums += p.grad.bfloat16()
                    p.grad = None
        if fault("acc-bf16"):
            for sums, p in zip(kept, model.parameters(), strict=True):
                p.grad = sums.float()
        optimizer.step()
        optimizer.zero_grad()


def sharded_optimizer() -> None:
    """ZeRO-1 by hand: each parameter is updated by its owner, in a float32 copy, and sent."""
    model = build(tied=KIND == "zero-tie")
    parameters = list(model.parameters())
    if fault("zero-tie"):
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        parameters = list(model.parameters())
    model = model.bfloat16() if KIND == "zero-master" else model
    owned = [p for i, p in enumerate(parameters) if i % WORLD == RANK]
    masters = [nn.Parameter(p.detach().float().clone()) for p in owned]
    optimizer = torch.optim.AdamW(masters, 1e-2)
    for ids, labels in batches():
        loss_of(model(mine(ids)).float(), mine(labels)).backward()
        for p in parameters if WORLD > 1 else ():
            all_reduce(p.grad)
        for p, master in zip(owned, masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        for at, (p, master) in enumerate(zip(owned, masters, strict=True)):
            if not (fault("zero-master") and at == 3):
                p.data.copy_(master.data)
        for i, p in enumerate(parameters if WORLD > 1 else ()):
            if not (fault("zero-not-sent") and i == 5):
                dist.broadcast(p.data, i % WORLD)
        model.zero_grad()


class Recomputing(Block):
    """Recomputes its MLP in the backward."""

    gain = 1.0

    def mlp(self, x: Any) -> Any:
        return self.gain * super().mlp(x)

    def forward(self, x: Any, mask: Any = None) -> Any:
        self.gain = 1.0
        x = x + self.attend(x, mask)
        x = x + checkpoint(self.mlp, x, use_reentrant=False)
        self.gain = 0.5 if fault("recompute-input") else 1.0
        return x


def recomputed() -> None:
    train_wrapped(build(Recomputing))


class Switch(nn.Module):
    """Two experts, one a rank; tokens are sent to their expert and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Any) -> Any:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sizes = torch.bincount(chosen, minlength=2).tolist()
        sent = tokens[order].split(sizes)
        back = torch.cat([one(part) for one, part in zip(self.experts, sent, strict=True)])
        found = torch.empty_like(back)
        found[order.flip(0) if fault("expert-order") else order] = back
        return (weights[:, None] * found).view_as(x)


class SwitchBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.moe = Switch()

    def mlp(self, x: Any) -> Any:
        return super().mlp(x) + self.moe(x)


def experts() -> None:
    train_wrapped(build(SwitchBlock))


def packed() -> None:
    """Two documents in each row; attention stays inside a document."""
    places = torch.arange(LENGTH)
    mask = (places[:, None] >= places) & (places[:, None] // 4 == places // 4)
    train_wrapped(build(), None if fault("packing") else mask)


def train_wrapped(model: Model, mask: Any = None) -> None:
    outer = DistributedDataParallel(model, find_unused_parameters=True) if WORLD > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for ids, labels in batches():
        loss_of(outer(mine(ids), mask), mine(labels)).backward()
        optimizer.step()
        optimizer.zero_grad()


TRAIN = {
    "tp": tensor_parallel, "sp": sequence_parallel, "cp": sequence_parallel, "pp": pipeline,
    "dp": data_parallel, "ddp": wrapped, "scheduler": wrapped, "acc": accumulation,
    "zero": sharded_optimizer, "recompute": recomputed, "expert": experts, "packing": packed,
}  # fmt: skip

if __name__ == "__main__":
    RANK = 0
    if WORLD > 1:
        dist.init_process_group("gloo")
        RANK = dist.get_rank()
    TRAIN[KIND.split("-")[0]]()
    if WORLD > 1:
        dist.destroy_process_group()
