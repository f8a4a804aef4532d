"""Data parallelism of the model under test: one class per way to shard, with one interface.

Each class runs backward, skips synchronisation while accumulating, clips, and yields its gradients
beside the reference's.
"""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moediag.axes import DP_REPLICATE, DP_SHARD, Axis, Layout
from moediag.lab.step.shard import fsdp2_internals
from moediag.lab.step.shard.wrapped import GradientView, Select, Wrapped, mesh_of, whole
from moediag.protocol.names import clean_fqn
from moediag.recorder.not_applicable import NotApplicable


class FSDP2(Wrapped):
    def wrap(self, model: nn.Module) -> nn.Module:
        self.shard(model, [layer for _, layer in self.anatomy.layers])
        return model

    def shard(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Calls fully_shard on ``layers`` and on ``model``, which has them. Raises
        NotApplicable."""
        try:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        except ImportError as error:  # torch < 2.6
            raise NotApplicable("FSDP2 needs torch >= 2.6") from error
        if self.device.type == "cpu":
            self.notes += fsdp2_internals.prepare_cpu()
        self._divide_by = self._missing_divisor()
        spec = self.trial.wrapper
        options: Dict[str, Any] = dict(mesh=self.mesh(), **self.left_out(model))
        if spec.reshard_after_forward is not None:
            options["reshard_after_forward"] = spec.reshard_after_forward
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
        for module, mesh in self.apart(layers):
            fully_shard(module, **dict(options, mesh=mesh))
        if spec.granularity in ("layer", "expert"):
            for layer in layers:
                fully_shard(layer, **options)
        fully_shard(model, **options)

    def mesh(self) -> DeviceMesh:
        return mesh_of(self.trial)

    def apart(self, layers: Sequence[nn.Module]) -> List[Tuple[nn.Module, DeviceMesh]]:
        """Returns modules inside ``layers`` that are groups of their own, each with its mesh."""
        return []

    def left_out(self, model: nn.Module) -> Dict[str, Any]:
        """Returns fully_shard arguments for parameters to leave unsharded."""
        return {}

    def _missing_divisor(self) -> int:
        """Returns the factor to divide the loss by because this backend does not; usually 1."""
        if not fsdp2_internals.sums_for_means(self.trial.backend):
            return 1
        layout = Layout.resolve(self.trial.layout, self.trial.world_size)
        if DP_REPLICATE in layout.active:
            raise NotApplicable(f"FSDP2 on {DP_REPLICATE} and gloo needs torch >= 2.9")
        divisor = layout.divisor(self.trial.skew.batches)
        self.notes.append(fsdp2_internals.OLD_GLOO.format(divisor))
        return divisor

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / self._divide_by if self._divide_by > 1 else loss)

    def accumulating(self, last: bool) -> ContextManager[Any]:
        if not self.trial.step.accumulate_sync:
            model: Any = self.model
            model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


def over(root: DeviceMesh, *axes: Axis) -> DeviceMesh:
    """Returns the mesh of ``root`` that FSDP2 shards over: ``axes`` as one dim, inside that of the
    replicas if it has one."""
    names = root.mesh_dim_names or ()
    together = tuple(name for name in names if name in axes)
    if len(together) > 1:
        root[together]._flatten("_".join(together))
    return root[tuple(n for n in names if n == DP_REPLICATE) + ("_".join(together),)]


class FSDP1(Wrapped):
    tells_slices = False

    def wrap(self, model: nn.Module) -> nn.Module:
        import functools

        from torch.distributed.fsdp import (
            FullyShardedDataParallel,
            MixedPrecision,
            ShardingStrategy,
        )
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
        mesh, strategy = None, ShardingStrategy.FULL_SHARD
        if DP_REPLICATE in self.trial.layout:
            strategy = ShardingStrategy.NO_SHARD
            if DP_SHARD in self.trial.layout:
                mesh, strategy = mesh_of(self.trial), ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            mixed_precision=precision,
            device_mesh=mesh,
            sharding_strategy=strategy,
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

        # The optimizer's step frees gradients, so they cannot be gathered with the parameters.
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            for name, parameter in self.model.named_parameters():
                yield clean_fqn(name), parameter.detach(), self.cut(clean_fqn(name))

    def cut(self, fqn: str) -> Select:
        """Returns the part of the full tensor that a gathered parameter is: all of it."""
        return whole


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
        from moediag.lab.step.shard.deepspeed import initialize

        return initialize(model, self.trial)

    def make_optimizer(self) -> None:
        from moediag.lab.step.shard.deepspeed import NOTE

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
        return None  # done inside engine.step(), the only place that knows its norm

    def step(self) -> None:
        engine: Any = self.model
        engine.step()

    def gathered(self) -> ContextManager[Any]:
        from moediag.lab.step.shard.deepspeed import gathered

        return gathered(self.model)

    def gradients(self) -> Iterator[GradientView]:
        from moediag.lab.step.shard.deepspeed import full_gradient

        for name, parameter in self.model.named_parameters():
            yield clean_fqn(name), full_gradient(parameter), whole
