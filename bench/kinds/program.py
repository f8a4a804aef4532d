"""Kinds of silent errors known from public trackers, each on two ranks with its healthy twin: some
steps recorded for the laws, and a step inside ``moediag.verify.step``. The truth (where the error
is) was written before any page was seen.

    torchrun --nproc-per-node 2 program.py FOLDER [KIND...]

Rank 0 prints one JSON object a line for each kind, with the error and without it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moediag
from moediag import verify
from moediag.launch import comparing
from moediag.ranks.verify import comparison
from moediag.result import Diagnosis, read_result

WIDTH, WORDS, LONG, ROWS = 8, 12, 6, 4
STEPS = 8  # that the laws see


class Reduce(torch.autograd.Function):
    """Sums in the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Copy(torch.autograd.Function):
    """Sums in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Gather(torch.autograd.Function):
    """Joins the ranks' parts of the sequence; the gradient of a part is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: bool) -> torch.Tensor:
        ctx.fault = fault
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        if not ctx.fault:
            dist.all_reduce(grad)
        return grad.chunk(2, 1)[dist.get_rank()], None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: Any = None, split: Any = None) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if split is not None:
            k, v = Gather.apply(k, split), Gather.apply(v, split)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Experts(nn.Module):
    """Four experts, one for each token; ``swapped`` returns the outputs in another order."""

    swapped = False

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weight, to = self.router(flat).softmax(-1).max(-1)
        order = to.argsort(stable=True)
        parts = flat[order].split(torch.bincount(to, minlength=4).tolist())
        out = torch.cat([e(p) for e, p in zip(self.experts, parts, strict=True)])
        back = order if self.swapped else order.argsort()
        return (out[back] * weight[:, None]).view(x.shape)


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.attn, self.norm, self.mlp = Attention(), nn.LayerNorm(WIDTH), Mlp()
        self.moe = Experts()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.mask: Callable[[torch.Tensor], Any] = lambda tokens: None
        self.split: Any = None
        self.again: Any = None  # recomputes the mlp

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.attn(x, self.mask(tokens), self.split)
        y = self.norm(x)
        x = x + (self.again(self.mlp, y) if self.again is not None else self.mlp(y))
        x = x + self.moe(x)
        return self.head(x)


def build(tied: bool = False) -> Model:
    torch.manual_seed(3)
    return Model(tied)


def batch(rank: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(20 + rank)
    tokens = torch.randint(0, WORDS, (rows, LONG), generator=generator)
    labels = torch.randint(0, WORDS, (rows, LONG), generator=generator)
    return {"tokens": tokens, "labels": labels}


def loss(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(given["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten(), ignore_index=-1)


@dataclass
class Case:
    """A step of both ranks."""

    model: Any
    step: Callable[[], None]
    optimizer: Any
    given: dict[str, torch.Tensor]
    reference: Callable[[], Any] = build
    loss: Callable[[Any, Any], Any] = loss
    clip: float | None = None


def reduced(model: nn.Module, but: tuple[str, ...] = (), by: int = 2) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not name.startswith(but or ("-",)):
            dist.all_reduce(parameter.grad)
            parameter.grad /= by


def by_hand(
    between: Callable[[Model, Any], None],
    model: Any = None,
    clip: float | None = None,
    **given: Any,
) -> Case:
    """Data parallel by hand: ``between`` runs after the backward and before the update."""
    own = given.pop("own", None) or batch(dist.get_rank())
    model = model or build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step() -> None:
        loss(model, own).backward()
        between(model, optimizer)

    return Case(model, step, optimizer, own, clip=clip, **given)


def then_step(act: Callable[[Model], None]) -> Callable[[Model, Any], None]:
    def between(model: Model, optimizer: Any) -> None:
        act(model)
        optimizer.step()

    return between


# ------------------------------------------------------------------------ tensor parallel


class VocabularyPart(nn.Module):
    def __init__(self, whole: nn.Embedding, fault: bool) -> None:
        super().__init__()
        self.half, self.fault = WORDS // 2, fault
        self.first = dist.get_rank() * self.half
        self.weight = nn.Parameter(
            whole.weight[self.first : self.first + self.half].detach().clone()
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        local = tokens - self.first
        out = (local < 0) | (local >= self.half - self.fault)
        found = F.embedding(local.clamp(0, self.half - 1), self.weight)
        return Reduce.apply(found.masked_fill(out[..., None], 0.0))


class MlpPart(nn.Module):
    """Columns of ``up`` and rows of ``down``."""

    def __init__(self, whole: Mlp, fault: str) -> None:
        super().__init__()
        self.fault, part = fault, slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.up.weight.data, self.up.bias.data = (
            whole.up.weight.data[part],
            whole.up.bias.data[part],
        )
        self.down.weight.data, self.down.bias.data = (
            whole.down.weight.data[:, part],
            whole.down.bias.data,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.up(x if self.fault == "copy" else Copy.apply(x)))
        if self.fault == "bias":
            return Reduce.apply(self.down(x))
        return Reduce.apply(F.linear(x, self.down.weight)) + self.down.bias


def same_batch(model: Model, finish: Callable[[Model], None] = lambda _: None) -> Case:
    return by_hand(then_step(finish), model, own=batch(0))


def vocabulary_mask(fault: bool) -> Case:
    model = build()
    model.embed = VocabularyPart(model.embed, fault)  # type: ignore[assignment]
    return same_batch(model)


def column_input(fault: bool) -> Case:
    model = build()
    model.mlp = MlpPart(model.mlp, "copy" if fault else "")  # type: ignore[assignment]
    return same_batch(model)


def row_bias(fault: bool) -> Case:
    model = build()
    model.mlp = MlpPart(model.mlp, "bias" if fault else "")  # type: ignore[assignment]
    return same_batch(model)


def stale_buffer(fault: bool) -> Case:
    def finish(model: Model) -> None:
        old = torch.randn(model.mlp.up.weight.shape, generator=torch.Generator().manual_seed(1))
        reduced(model)
        if fault:
            model.mlp.up.weight.grad.copy_(0.1 * old)  # type: ignore[union-attr]

    return by_hand(then_step(finish))


# ------------------------------------------------------------------------ sequence, context


def split_sequence(own_grads: tuple[str, ...] = (), kv: bool = False, scale: float = 1.0,
                   own_mean: bool = False, padded: bool = False) -> Case:  # fmt: skip
    """Each rank has half of each sequence; keys and values are gathered."""
    whole, model, rank = batch(0), build(), dist.get_rank()
    if padded:
        whole["labels"][:, LONG - 2 :] = -1
    count = (whole["labels"] >= 0).sum()
    model.split = kv
    own = {name: t.chunk(2, 1)[rank] for name, t in whole.items()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step() -> None:
        logits, labels = model(own["tokens"]), own["labels"].flatten()
        total = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-1, reduction="sum")
        (total / ((labels >= 0).sum() * 2 if own_mean else count) * scale).backward()
        reduced(model, own_grads, by=1)
        optimizer.step()

    return Case(model, step, optimizer, whole)


# ------------------------------------------------------------------------ pipeline


class Stage(nn.Module):
    """The second one has the head; both have ``mlp`` layers of their own."""

    def __init__(self, whole: nn.Module, lost: bool) -> None:
        super().__init__()
        self.rank = dist.get_rank()
        if self.rank == 0:
            self.embed = whole.embed
        else:
            self.head = whole.head
        held = ([0] if lost else [0, 1]) if self.rank == 0 else [2]
        self.layers = nn.ModuleList(
            whole.layers[i] if i in held else nn.Identity() for i in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if self.rank == 0 else x
        for layer in self.layers:
            x = layer(x)
        return x if self.rank == 0 else self.head(x)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def pipeline(lost: bool, untied: bool) -> Case:
    stage, own = Stage(Deep(), lost), batch(0)
    optimizer = torch.optim.AdamW(stage.parameters(), 1e-2)

    def step() -> None:
        if stage.rank == 0:
            x = stage(own["tokens"])
            dist.send(x.detach(), 1)
            gradient = torch.empty_like(x)
            dist.recv(gradient, 1)
            x.backward(gradient)
        else:
            x = torch.empty(ROWS, LONG, WIDTH)
            dist.recv(x, 0)
            logits = stage(x.requires_grad_())
            F.cross_entropy(logits.flatten(0, 1), own["labels"].flatten()).backward()
            dist.send(x.grad, 0)
        if not untied:
            dist.all_reduce((stage.head if stage.rank else stage.embed).weight.grad)
        optimizer.step()

    return Case(stage, step, optimizer, own, reference=Deep)


# ------------------------------------------------------------------------ data parallel


def clip_first(fault: bool) -> Case:
    def between(model: Model, optimizer: Any) -> None:
        if not fault:
            reduced(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if fault:
            reduced(model)
        optimizer.step()

    return by_hand(between, clip=0.05)


def wrapped(bare: bool = False, unsynced: bool = False, replaced: bool = False) -> Case:
    inner, own = build(), batch(dist.get_rank())
    model = DistributedDataParallel(inner, find_unused_parameters=replaced)
    if replaced:
        inner.head.weight = nn.Parameter(inner.head.weight.detach().clone())
    optimizer = torch.optim.AdamW(inner.parameters(), 1e-2)

    def step() -> None:
        for rows in (slice(0, 2), slice(2, 4)):
            with model.no_sync() if unsynced or rows.start == 0 else nullcontext():
                part = {name: tensor[rows] for name, tensor in own.items()}
                (loss(inner if bare else model, part) / 2).backward()
        optimizer.step()

    return Case(model, step, optimizer, own)


def scheduled(fault: bool) -> Case:
    case = wrapped()
    scheduler = torch.optim.lr_scheduler.LambdaLR(case.optimizer, lambda i: max(0.1, 1 - i / 16))

    def step() -> None:
        case.step()
        for _ in range(dist.get_world_size() if fault else 1):
            scheduler.step()

    return replace(case, step=step)


# ------------------------------------------------------------------------ accumulation


def accumulated(fault: bool, low: bool) -> Case:
    own = batch(0, 8 if low else ROWS)
    own["labels"][2:, 2:] = -1 if not low else own["labels"][2:, 2:]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    count = (own["labels"] >= 0).sum()

    def step() -> None:
        kept: dict[str, torch.Tensor] = {}
        for at in range(0, len(own["tokens"]), 1 if low else 2):
            part = {name: tensor[at : at + (1 if low else 2)] for name, tensor in own.items()}
            share = (part["labels"] >= 0).sum() / count if low or not fault else 0.5
            (loss(model, part) * share).backward()
            for name, p in model.named_parameters():
                if low and p.grad is not None:
                    now = p.grad.bfloat16() if fault else p.grad
                    kept[name] = kept[name] + now if name in kept else now.clone()
                    p.grad = None
        for name, p in model.named_parameters():
            p.grad = kept[name].float() if low and name in kept else p.grad
        optimizer.step()

    return Case(model, step, optimizer, own)


# ------------------------------------------------------------------------ ZeRO by hand


def zero(not_sent: bool = False, not_copied: bool = False, tie_lost: bool = False) -> Case:
    """Rank i updates every second parameter and sends it."""
    model, rank, own = build(tied=True), dist.get_rank(), batch(dist.get_rank())
    named = dict(model.named_parameters())
    mine = [p for i, p in enumerate(named.values()) if i % 2 == rank]
    optimizer = torch.optim.AdamW(mine, 1e-2)
    before = {name: p.detach().clone() for name, p in named.items()}

    def step() -> None:
        loss(model, own).backward()
        reduced(model)
        optimizer.step()
        for i, (name, p) in enumerate(named.items()):
            if not_copied and name == "mlp.down.weight":
                p.data.copy_(before[name])
            if not_sent and name == "mlp.up.weight":
                continue
            dist.broadcast(p.data, i % 2)
        if tie_lost:
            model.head.weight = nn.Parameter(before["embed.weight"])

    return Case(model, step, optimizer, own, reference=lambda: build(tied=True))


# ------------------------------------------------------------------------ others


def recomputed(fault: bool) -> Case:
    model, calls = build(), []

    def again(mlp: nn.Module, y: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            again = len(calls) % 2 == 0  # of a step: the forward, then the backward
            return mlp(x * (1.5 if fault and again else 1.0))

        return checkpoint(run, y, use_reentrant=False)

    model.again = again
    return by_hand(then_step(reduced), model)


def packed(fault: bool) -> Case:
    """Two documents in each row; a token sees its own document."""
    document = torch.arange(LONG) // 3
    own_only = document[:, None] == document[None, :]

    def masked() -> Model:
        model = build()
        model.mask = lambda tokens: own_only
        return model

    model = masked()
    if fault:
        model.mask = lambda tokens: None
    return by_hand(then_step(reduced), model, reference=masked)


def other_order(fault: bool) -> Case:
    model = build()
    model.moe.swapped = fault
    return by_hand(then_step(reduced), model)


KINDS: dict[str, tuple[Callable[[bool], Case], tuple[str, ...]]] = {
    # kind: the step; the module or parameters in which the error is, () for all
    "tp-vocabulary-mask": (vocabulary_mask, ("embed",)),
    "tp-column-input": (column_input, ("mlp", "mlp.up")),
    "tp-row-bias": (row_bias, ("mlp", "mlp.down")),
    "tp-stale-buffer": (stale_buffer, ("mlp.up.weight",)),
    "sp-layernorm": (
        lambda fault: split_sequence(("norm",) if fault else ()), ("norm.weight", "norm.bias"),
    ),
    "sp-router": (
        lambda fault: split_sequence(("moe.router",) if fault else ()), ("moe.router.weight",),
    ),
    "cp-loss-scale": (lambda fault: split_sequence(scale=0.5 if fault else 1.0), ()),
    "cp-keys-values": (lambda fault: split_sequence(kv=fault), ("attn.k", "attn.v", "attn")),
    "cp-own-mean": (lambda fault: split_sequence(own_mean=fault, padded=True), ()),
    "pp-lost-layer": (lambda fault: pipeline(fault, False), ("layers.1",)),
    "pp-tied": (lambda fault: pipeline(False, fault), ("embed.weight", "head.weight")),
    "dp-left-out": (
        lambda fault: by_hand(then_step(lambda m: reduced(m, ("mlp.up",) if fault else ()))),
        ("mlp.up.weight", "mlp.up.bias"),
    ),
    "dp-sum": (lambda fault: by_hand(then_step(lambda m: reduced(m, by=1 if fault else 2))), ()),
    "dp-clip-first": (clip_first, ()),
    "ddp-module": (lambda fault: wrapped(bare=fault), ()),
    "ddp-no-sync": (lambda fault: wrapped(unsynced=fault), ()),
    "ddp-replaced": (lambda fault: wrapped(replaced=fault), ("head.weight",)),
    "scheduler-by-rank": (scheduled, ()),
    "accumulation-unequal": (lambda fault: accumulated(fault, False), ()),
    "accumulation-bfloat16": (lambda fault: accumulated(fault, True), ()),
    "zero-not-sent": (lambda fault: zero(not_sent=fault), ("mlp.up.weight",)),
    "zero-not-copied": (lambda fault: zero(not_copied=fault), ("mlp.down.weight",)),
    "zero-tie-lost": (lambda fault: zero(tie_lost=fault), ("embed.weight", "head.weight")),
    "recompute-input": (recomputed, ("mlp",)),
    "packing-mask": (packed, ("attn",)),
    "expert-order": (other_order, ("moe",)),
}  # fmt: skip


def recorded(kind: str, fault: bool, folder: Path) -> None:
    """Makes steps that are recorded for the laws."""
    with moediag.laws.recording(str(folder)):
        case = KINDS[kind][0](fault)
        for _ in range(STEPS):
            case.step()
            case.model.zero_grad()


def compared(kind: str, fault: bool, folder: Path) -> None:
    """Makes a step that is compared with one process."""
    case = KINDS[kind][0](fault)
    with verify.step(
        case.model, case.optimizer, reference=case.reference, loss=case.loss,
        batch=deepcopy(case.given), clip=case.clip, out=folder,
    ):  # fmt: skip
        case.step()


def told(kind: str, fault: bool, by: str, found: Diagnosis) -> str:
    line = {"kind": kind, "fault": fault, "truth": KINDS[kind][1], "by": by, **asdict(found)}
    return json.dumps(line, default=str)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    comparing.compare = lambda python, target, job, runs: (  # in this process: no start of torch
        comparison.compare(job, list(runs), target) or ""
    )
    verify._show = lambda done: None
    for kind in sys.argv[2:] or KINDS:
        for fault in (True, False):
            folder = Path(sys.argv[1]) / f"{kind}-{'fault' if fault else 'healthy'}"
            recorded(kind, fault, folder / "laws")
            dist.barrier()
            compared(kind, fault, folder / "verify")
            dist.barrier()
            if dist.get_rank() == 0:
                laws = moediag.diagnose(folder / "laws").trials[-1].diagnosis
                print(told(kind, fault, "laws", laws))
                step = read_result(folder / "verify").trials[-1].diagnosis
                print(told(kind, fault, "verify", step), flush=True)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
