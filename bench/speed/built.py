"""Builds the timed step: a model on its device, sharded, with its optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.speed import listed
from bench.speed.sizes import Size
from bench.speed.words import FUSED
from moediag.lab.step import kernels, preparation, training
from moediag.lab.step.models import checkpoint, tiny
from moediag.lab.step.models.skew import RouterSkew, routed
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import ModelSpec, SkewSpec, StepSpec, Trial, WrapperSpec

SEED = 0


def trial(size: Size, device: torch.device, backend: str, scratch: Path, ep: bool) -> Trial:
    """``ep``: ranks divide the experts and share a batch; they load a checkpoint in ``scratch``.
    Otherwise each has a batch of its own and all parameters are sharded."""
    world, cuda = dist.get_world_size(), device.type == "cuda"
    return Trial(
        "speed", "speed", "speed",
        world_size=world,
        layout={"ep": world} if ep else {"dp_shard": world},
        backend=backend,
        shared_gpu=cuda and backend == "gloo",
        model=dataclasses.replace(size.model, source="checkpoint" if ep else "config"),
        wrapper=WrapperSpec(kind="fsdp2", param_dtype="bfloat16", reduce_dtype="float32"),
        step=StepSpec(
            batch=size.batch, seq_len=size.seq_len, seed=SEED, parameter_groups="per-mesh",
            clipping="per-mesh" if ep else "torch",
            # On a GPU: foreach would hold another copy of all parameters for a moment.
            fused=True if cuda else None,
        ),
        skew=SkewSpec(batches="per-replica"),
        reference_path=str(scratch / f"{size.name}.pt"),
    )  # fmt: skip


def fused(asked: Trial, device: torch.device) -> Wrapped:
    """Returns the model with the experts of transformers, divided over the ranks if there are
    several. Collective."""
    if asked.model.source == "config":
        model = _on_device(asked.model, device)
        return _wrapped(model, asked)
    if dist.get_rank() == 0 and not asked.checkpoint_path.exists():
        checkpoint.save(_on_device(asked.model, device).cpu(), asked.checkpoint_path)
    dist.barrier()
    return _wrapped(checkpoint.from_checkpoint(asked, device), asked)


def apart(asked: Trial, device: torch.device, fix: str | None) -> Wrapped:
    """Returns the model with experts as modules and ``fix``. Raises NotApplicable."""
    model = _on_device(asked.model, device)
    listed.take_apart(model, tiny.anatomy(model, asked.model))
    return _wrapped(model, dataclasses.replace(asked, fix=fix))


def use(model: nn.Module, kernel: str) -> None:
    """Makes the experts use ``kernel``. Raises NotApplicable."""
    checkpoint.known(kernel)
    for part in _configs(model):
        part._experts_implementation = kernel


class Experts:
    """The experts of one layer alone, in bf16: no router, no attention, no sharding."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        spec = dataclasses.replace(size.model, layers=1)
        self.model = _on_device(spec, device).bfloat16()
        (block,) = tiny.anatomy(self.model, spec).blocks
        self._block: Any = block.module

    def stepping(self, kernel: str, routing: str) -> Callable[[], None]:
        """Returns a function that runs them forward and backward. Raises NotApplicable."""
        use(self.model, kernel)
        model, tokens = self.size.model, self.size.tokens
        index = routed(routing, tokens, model.experts, model.top_k).to(self.device)
        share = torch.full(index.shape, 1 / model.top_k, device=self.device).bfloat16()
        x, gradient = (
            torch.randn(tokens, model.hidden, device=self.device).bfloat16() for _ in range(2)
        )
        x.requires_grad_()

        def one() -> None:
            self._block.experts(x, index, share).backward(gradient)
            self._block.zero_grad(set_to_none=True)
            x.grad = None

        return one

    def products(self, kernel: str, routing: str) -> Callable[[], None] | None:
        """Returns a function that runs their matrix products alone, forward and backward, on rows
        that are sorted by expert; None for a kernel that does not multiply so."""
        if kernel not in FUSED:
            return None
        model, experts = self.size.model, self._block.experts
        index = routed(routing, self.size.tokens, model.experts, model.top_k).flatten().sort()[0]
        ends = torch.searchsorted(index, torch.arange(model.experts), right=True)
        ends = ends.to(self.device, torch.int32)
        layers = []
        for weight in (experts.gate_up_proj, experts.down_proj):
            outer, inner = weight.shape[1:]
            x, gradient = (
                torch.randn(self.size.slots, width, device=self.device).bfloat16()
                for width in (inner, outer)
            )
            layers.append((x.requires_grad_(), weight, gradient))
        groups = kernels.load().groups_for(layers[0][0], ends)

        def one() -> None:
            for x, weight, gradient in layers:
                if kernel == "triton":
                    y = kernels.load().linear(x, weight, groups)
                else:
                    y = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
                y.backward(gradient)
                x.grad = weight.grad = None

        return one


def stepping(wrapped: Wrapped, routing: str, device: torch.device) -> Callable[[], None]:
    """Returns a function that runs one whole step: forward, backward, clip, AdamW."""
    skew = RouterSkew(SkewSpec(routing=routing), wrapped.anatomy.experts)

    def one() -> None:
        with skew.installed(wrapped.anatomy):
            training.forward_backward(wrapped, dist.get_rank(), 1, device)
            training.finish(wrapped)

    return one


def _on_device(spec: ModelSpec, device: torch.device) -> nn.Module:
    with device:  # tens of gigabytes need not pass through the host
        return tiny.build(spec, SEED)


def _wrapped(model: nn.Module, asked: Trial) -> Wrapped:
    for part in _configs(model):
        part._attn_implementation = "sdpa"  # the eager one keeps the whole square
    return preparation.wrap(model, tiny.anatomy(model, asked.model), asked)


def _configs(model: Any) -> list[Any]:
    found = (model.config, getattr(model.config, "text_config", None))
    return [part for part in found if part is not None]
