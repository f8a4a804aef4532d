"""A small language model, trained as users do it, for `moediag verify`: wrapped in several ways, in
one process or several, with one fault or none.

Ranks share eight samples a step, so one process that sees all eight is the same training.
"""

from __future__ import annotations

import argparse
import os
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

SAMPLES, STEPS, CLIP = 8, 4, 0.1


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 24)
        self.down = nn.Linear(24, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    """With tied embeddings and a frozen parameter."""

    def __init__(self, dropout: float, frozen: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(Block(16) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0].norm.bias.requires_grad_(not frozen)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.dropout(x))


class Stage(nn.Module):
    """One of two stages of a pipeline. The second has the shared embedding as its head."""

    def __init__(self, model: Model, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.layers = nn.ModuleList(nn.Identity() for _ in model.layers)
        self.layers[rank] = model.layers[rank]
        setattr(self, "head" if rank else "embed", model.head if rank else model.embed)
        self.shared_name = "head" if rank else "embed"

    @property
    def shared(self) -> torch.Tensor:
        return getattr(self, self.shared_name).weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.rank else self.embed(x)
        x = self.layers[self.rank](x)
        return self.head(x) if self.rank else x

    def train_on(self, tokens: torch.Tensor, micro_batches: int) -> None:
        if self.rank == 0:
            x = self(tokens[:, :-1])
            dist.send(x.detach(), 1)
            gradient = torch.empty_like(x)
            dist.recv(gradient, 1)
            x.backward(gradient)
            return
        x = torch.empty(len(tokens), tokens.shape[1] - 1, 16)
        dist.recv(x, 0)
        logits = self(x.requires_grad_())
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / micro_batches).backward()
        dist.send(x.grad, 0)


def earlier_steps(model: nn.Module) -> dict[str, Any]:
    """The state of an optimizer after three steps, as a checkpoint has it."""
    copy = deepcopy(model)
    optimizer = torch.optim.AdamW(copy.parameters(), lr=1e-2)
    for _ in range(3):
        for parameter in copy.parameters():
            parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
        optimizer.step()
    return optimizer.state_dict()


def wrapped(model: Model, way: str, world: int, low: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if way == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else None
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh, **({"mp_policy": policy} if policy else {}))
    elif way == "tp":
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        for layer in model.layers:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh, plan)
    elif way.startswith("fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=way == "fsdp1",
            device_id=torch.device("cpu"),
        )  # fmt: skip
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    ways = ("alone", "ddp", "fsdp2", "tp", "fsdp1", "fsdp1-flat", "pp")
    parser.add_argument("way", choices=ways)
    parser.add_argument("--fault", default="")
    parser.add_argument("--micro", type=int, default=8, help="samples of a micro-batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-all", action="store_true", help="freeze no parameter")
    parser.add_argument("--low", action="store_true", help="compute in bfloat16")
    parser.add_argument("--resume", action="store_true", help="with the state of earlier steps")
    given = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if given.way != "alone":
        dist.init_process_group("gloo")
    torch.manual_seed(given.seed)
    frozen = not given.train_all  # FSDP1 cannot flatten it together with others
    model = Model(0.5 if given.fault == "dropout" else 0.0, frozen)
    if given.fault == "frozen":
        model.layers[1].up.weight.requires_grad_(False)
    earlier = earlier_steps(model) if given.resume and given.fault != "forgets" else None
    model = Stage(model, rank) if given.way == "pp" else model
    model = wrapped(model, given.way, world, given.low)
    rate = 1e-2 * (1 + rank) if given.fault == "rate" else 1e-2
    left_out = "layers.0.down" if given.fault == "left-out" else "-"
    trained = [p for name, p in model.named_parameters() if left_out not in name]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    if earlier is not None:
        optimizer.load_state_dict(earlier)
    shares = 1 if given.way in ("tp", "pp") else world
    data = torch.randint(0, 30, (STEPS, SAMPLES, 9), generator=torch.Generator().manual_seed(7))
    for samples in data:
        own = samples[rank::shares] if shares > 1 and given.fault != "sampler" else samples
        own = own if given.fault != "sampler" else own[: SAMPLES // shares]
        micro_batches = own.split(given.micro)
        optimizer.zero_grad()
        for tokens in micro_batches:
            if given.way == "pp":
                model.train_on(tokens, len(micro_batches))
                continue
            logits = model(tokens[:, :-1]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss = loss / len(micro_batches)
            if given.fault == "divided-twice":
                loss = loss / len(micro_batches)
            loss.backward()
        if given.way.startswith("fsdp1"):
            model.clip_grad_norm_(CLIP)
        elif given.way == "pp" and given.fault != "untied":
            dist.all_reduce(model.shared.grad)  # both stages hold it
        elif given.way not in ("tp", "pp"):  # torch cannot add norms of DTensors and plain tensors
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


if __name__ == "__main__":
    main()
