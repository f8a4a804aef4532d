"""Sharding of the model under test: one class per way to do data parallelism, one interface.

Each class knows how to run backward, how to leave out synchronisation while accumulating, how to
clip, and how to show its gradients beside the reference's: ``gradients()`` yields, per parameter,
this rank's part of the gradient and a function that cuts the same part out of the full one.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Tuple, Type

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moediag.protocol import Trial
from moediag.worker import clip, fsdp2, optimizers, place
from moediag.worker.models import Anatomy, NotApplicable
from moediag.worker.slices import PlainShards

Select = Callable[[torch.Tensor], torch.Tensor]
GradientView = Tuple[str, Optional[torch.Tensor], Select]

_PREFIXES = re.compile(r"(?:^|(?<=\.))(?:module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def clean_fqn(name: str) -> str:
    """The parameter's name in the user's model, without the wrappers' prefixes."""
    return _PREFIXES.sub("", name)


def mesh_of(trial: Trial) -> DeviceMesh:
    """The trial's device mesh. Raises NotApplicable for an axis this wrapper does not shard by."""
    foreign = [a for a, n in trial.layout.items() if n > 1 and not a.startswith("dp_")]
    if foreign:
        raise NotApplicable(f"wrapper {trial.wrapper.kind} has no mesh axis {', '.join(foreign)}")
    axes = {a: n for a, n in trial.layout.items() if a.startswith("dp_")}
    # An axis of size 1 would only add empty collectives.
    axes = {a: n for a, n in axes.items() if n > 1} or {"dp_shard": trial.world_size}
    device = "cuda" if trial.on_gpu else "cpu"
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


class Wrapped:
    """A model ready to train. The base class is the unsharded model of a single process.

    ``tells_slices``: parameters are DTensors, plain whole tensors, or ``plain_shards``, so that
    every rank can say which slice of the whole it holds. Flat parameters cannot.
    """

    tells_slices = True
    plain_shards = PlainShards()

    def __init__(self, model: nn.Module, anatomy: Anatomy, trial: Trial) -> None:
        self.anatomy = anatomy
        self.trial = trial
        self.ep_rank = ep_rank(trial)
        self._places: Dict[str, Select] = {}
        self.device = next(model.parameters()).device
        self.notes: List[str] = []
        self.model = self.wrap(model)
        self.optimizer: Any = None

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def make_optimizer(self) -> None:
        """After fixes have been applied: they may still add hooks, not parameters."""
        self.optimizer = optimizers.build(self.model.parameters(), self.trial.step)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens (batch, seq_len) int64 -> mean next-token cross-entropy in fp32, scalar."""
        # The mask is all ones, but some releases mistake 3-D position ids of multimodal families
        # for packed sequences when there is none.
        mask = torch.ones_like(tokens)
        logits: Any = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        if place.distributed(logits):
            logits = logits.full_tensor()
        return F.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]).float(), tokens[:, 1:].reshape(-1)
        )

    def accumulating(self, last: bool) -> ContextManager[Any]:
        """Around forward and backward of one micro-batch, where gradients are not reduced."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip(self, limit: float) -> Optional[float]:
        """Clips to ``limit``; the norm before, or None where the library does not tell it."""
        parameters = {clean_fqn(name): p for name, p in self.model.named_parameters()}
        return clip.clip(parameters, limit, self.trial.step.clipping, self.plain_shards)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gathered(self) -> ContextManager[Any]:
        """Around reading parameters: those that a wrapper flattens or empties have their own shape
        here. Collective."""
        return contextlib.nullcontext()

    def gradients(self) -> Iterator[GradientView]:
        for name, parameter in self.model.named_parameters():
            fqn = clean_fqn(name)
            if fqn not in self._places:
                self._places[fqn] = self._place(parameter)
            yield fqn, _reduced(parameter), self._places[fqn]

    def weights(self) -> Iterator[GradientView]:
        """As ``gradients()``, this rank's part of each parameter itself."""
        for name, parameter in self.model.named_parameters():
            fqn = clean_fqn(name)
            if fqn not in self._places:
                self._places[fqn] = self._place(parameter)
            yield fqn, place.local(parameter), self._places[fqn]

    def _place(self, parameter: Any) -> Select:
        """Cuts this rank's part out of the full tensor, by the placement; a plain tensor that is
        smaller than the full one is the piece of this rank's place on the ep axis."""
        where = place.index(parameter)
        if where is not None:
            return lambda full: full.reshape(-1)[where.reshape(-1)].reshape(where.shape)
        shape, at = parameter.shape, self.ep_rank
        return lambda full: place.piece(full, shape, at)


class FSDP2(Wrapped):
    def wrap(self, model: nn.Module) -> nn.Module:
        try:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        except ImportError as error:  # torch < 2.6
            raise NotApplicable("FSDP2 needs torch >= 2.6") from error
        if self.device.type == "cpu":
            self.notes += fsdp2.prepare_cpu()
        self._divide_by = self._missing_divisor()
        spec = self.trial.wrapper
        options: Dict[str, Any] = dict(
            mesh=self.mesh(),
            reshard_after_forward=spec.reshard_after_forward,
            **self.left_out(model),
        )
        asked = {"param_dtype": spec.param_dtype, "reduce_dtype": spec.reduce_dtype}
        dtypes = {name: getattr(torch, dtype) for name, dtype in asked.items() if dtype}
        if dtypes:
            options["mp_policy"] = MixedPrecisionPolicy(**dtypes)
        if spec.granularity == "expert":
            if self.anatomy.fused:
                raise NotApplicable(
                    "experts are one 3-D parameter here: they cannot be FSDP groups of their own"
                )
            for block in self.anatomy.blocks:
                for _, expert in block.experts:
                    fully_shard(expert, **options)
        if spec.granularity in ("layer", "expert"):
            for _, layer in self.anatomy.layers:
                fully_shard(layer, **options)
        fully_shard(model, **options)
        return model

    def mesh(self) -> DeviceMesh:
        return mesh_of(self.trial)

    def left_out(self, model: nn.Module) -> Dict[str, Any]:
        """Arguments of fully_shard by which it leaves parameters alone."""
        return {}

    def _missing_divisor(self) -> int:
        """What the loss must be divided by because this backend does not; 1 as a rule."""
        if not fsdp2.sums_for_means(self.trial.backend):
            return 1
        replicas = self.trial.layout.get("dp_replicate", 1)
        if replicas > 1:
            raise NotApplicable("FSDP2 on dp_replicate and gloo needs torch >= 2.9")
        self.notes.append(fsdp2.OLD_GLOO.format(self.trial.world_size))
        return self.trial.world_size

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / self._divide_by if self._divide_by > 1 else loss)

    def accumulating(self, last: bool) -> ContextManager[Any]:
        if not self.trial.step.accumulate_sync:
            model: Any = self.model
            model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


class FSDP1(Wrapped):
    tells_slices = False

    def wrap(self, model: nn.Module) -> nn.Module:
        import functools

        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

        spec = self.trial.wrapper
        units = (
            {id(layer) for _, layer in self.anatomy.layers} if spec.granularity != "root" else set()
        )
        if spec.granularity == "expert":
            units |= {id(e) for block in self.anatomy.blocks for _, e in block.experts}
        policy = functools.partial(
            lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in units
        )
        precision = None
        if spec.reduce_dtype:
            precision = MixedPrecision(reduce_dtype=getattr(torch, spec.reduce_dtype))
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            mixed_precision=precision,
            use_orig_params=True,
            device_id=self.device if self.device.type == "cuda" else torch.device("cpu"),
        )

    def accumulating(self, last: bool) -> ContextManager[Any]:
        model: Any = self.model
        if last or self.trial.step.accumulate_sync:
            return contextlib.nullcontext()
        return model.no_sync()

    def clip(self, limit: float) -> Optional[float]:
        model: Any = self.model
        return float(model.clip_grad_norm_(limit))

    def gathered(self) -> ContextManager[Any]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        context: ContextManager[Any] = FullyShardedDataParallel.summon_full_params(
            self.model, with_grads=True, writeback=False
        )
        return context

    def gradients(self) -> Iterator[GradientView]:
        with self.gathered():
            for name, parameter in self.model.named_parameters():
                yield clean_fqn(name), parameter.grad, self.cut(clean_fqn(name))

    def weights(self) -> Iterator[GradientView]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        # Gradients are gone after the optimizer's step, so they cannot be gathered with them.
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            for name, parameter in self.model.named_parameters():
                yield clean_fqn(name), parameter.detach(), self.cut(clean_fqn(name))

    def cut(self, fqn: str) -> Select:
        """Which part of the full tensor a gathered parameter is: all of it."""
        return _whole


class DDP(Wrapped):
    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=self.trial.wrapper.find_unused_parameters
        )

    def accumulating(self, last: bool) -> ContextManager[Any]:
        model: Any = self.model
        if last or self.trial.step.accumulate_sync:
            return contextlib.nullcontext()
        return model.no_sync()


class DeepSpeedZero(Wrapped):
    """ZeRO-2 and ZeRO-3 through ``deepspeed.initialize``."""

    tells_slices = False

    def wrap(self, model: nn.Module) -> nn.Module:
        from moediag.worker.deepspeed import initialize

        return initialize(model, self.trial)

    def make_optimizer(self) -> None:
        from moediag.worker.deepspeed import NOTE

        self.optimizer = self.model.optimizer
        if self.trial.backend == "gloo":
            self.notes.append(NOTE)

    def backward(self, loss: torch.Tensor) -> None:
        engine: Any = self.model
        # The engine divides by the accumulation steps itself.
        engine.backward(loss * self.trial.step.accumulate)

    def accumulating(self, last: bool) -> ContextManager[Any]:
        engine: Any = self.model
        engine.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def clip(self, limit: float) -> Optional[float]:
        return None  # done inside engine.step(); its norm is known only there

    def step(self) -> None:
        engine: Any = self.model
        engine.step()

    def gathered(self) -> ContextManager[Any]:
        from moediag.worker.deepspeed import gathered

        return gathered(self.model)

    def gradients(self) -> Iterator[GradientView]:
        from moediag.worker.deepspeed import full_gradient

        for name, parameter in self.model.named_parameters():
            yield clean_fqn(name), full_gradient(parameter), _whole


_KINDS: Dict[str, Type[Wrapped]] = {
    "fsdp2": FSDP2,
    "fsdp1": FSDP1,
    "ddp": DDP,
    "zero2": DeepSpeedZero,
    "zero3": DeepSpeedZero,
    "none": Wrapped,
}


def wrap(model: nn.Module, anatomy: Anatomy, trial: Trial) -> Wrapped:
    """Shards ``model`` as the trial says, with the fix's hooks around it. Raises NotApplicable."""
    from moediag import fixes

    fix = fixes.load(trial.fix) if trial.fix else None
    if fix is not None and hasattr(fix, "before_wrap"):
        fix.before_wrap(model, anatomy, trial.wrapper)
    kind = _kind(trial)
    if not kind.tells_slices and trial.step.clipping != "torch":
        raise NotApplicable(
            f"wrapper {trial.wrapper.kind} clips by itself, not by clipping: {trial.step.clipping}"
        )
    wrapped = kind(model, anatomy, trial)
    if fix is not None and hasattr(fix, "after_wrap"):
        fix.after_wrap(wrapped.model, anatomy, trial.wrapper)
    wrapped.make_optimizer()
    return wrapped


def _kind(trial: Trial) -> Type[Wrapped]:
    if trial.layout.get("ep", 1) > 1 or trial.wrapper.kind not in _KINDS:
        from moediag.worker import ep

        return ep.kind(trial)
    return _KINDS[trial.wrapper.kind]


def synchronize() -> None:
    """A barrier, and the device's queue drained, so that a clock means something."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()


def _whole(full: torch.Tensor) -> torch.Tensor:
    return full


def _reduced(parameter: Any) -> Optional[torch.Tensor]:
    """This rank's part of the gradient. One that is laid out in another way than its parameter
    (a sum that is still to be made, say) is brought there first: collective, on all ranks alike."""
    gradient = parameter.grad
    if gradient is None or not place.distributed(gradient):
        return gradient
    if not place.distributed(parameter):
        gradient = gradient.full_tensor()
    elif gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return place.local(gradient)


def ep_rank(trial: Trial) -> Optional[int]:
    """This rank's place on the ep axis; None without one. Ranks fill the mesh row by row."""
    if trial.layout.get("ep", 1) == 1 or not dist.is_initialized():
        return None
    axes = list(trial.layout)
    inner = 1
    for axis in axes[axes.index("ep") + 1 :]:
        inner *= trial.layout[axis]
    return dist.get_rank() // inner % trial.layout["ep"]
