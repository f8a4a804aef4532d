"""Models that transformers divided while loading, and ways to shard the rest.

``from_pretrained(distributed_config=...)`` returns the model with its experts divided over the ep
axis, or with the matrices of its tp_plan cut along the tp axis. Each class here is one way in which
users continue.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from typing import Any, ContextManager, Dict, List, Optional, Tuple, Type

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moediag.axes import DP_SHARD, EP, TP, Axis, Layout
from moediag.lab.step.models import checkpoint
from moediag.lab.step.shard import fsdp2_internals, optimizers
from moediag.lab.step.shard.data_parallel import FSDP2
from moediag.lab.step.shard.wrapped import Wrapped, expert_parameters
from moediag.protocol import ResumeTask, Trial
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step import pieces

ACCELERATE_ON_CPU = (
    "accelerate never enters its FSDP path on the CPU: after Accelerator(cpu=True, "
    "fsdp_plugin=...) its state was told distributed_type = FSDP; everything after that is the "
    "released code"
)


CAST = (
    "fully_shard leaves the experts out, so its MixedPrecisionPolicy does not reach them: their "
    "parameters are cast to {} in each forward, and their gradients come back in the parameters' "
    "own type"
)


def computing_in(dtype: torch.dtype, module: nn.Module) -> None:
    """Makes ``module`` compute with copies of its own parameters in ``dtype``; autograd casts the
    gradients back. It wraps the current forward, so that code that reads the parameters inside
    (transformers' local views of DTensors) reads the copies."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        held: Dict[str, Any] = module._parameters
        own = dict(held)
        held.update({n: None if p is None else p.to(dtype) for n, p in own.items()})
        try:
            return original(*args, **kwargs)
        finally:
            held.update(own)

    replaced: Any = module
    replaced.forward = forward


class Transformers(Wrapped):
    """``from_pretrained`` has already done everything."""

    def accumulating(self, last: bool) -> ContextManager[Any]:
        model: Any = self.model
        if not self.trial.step.accumulate_sync and hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


class ExpertsLeftOut(FSDP2):
    """Calls ``fully_shard`` by hand on the layers and the root over all ranks, and leaves the
    experts where from_pretrained put them."""

    def wrap(self, model: nn.Module) -> nn.Module:
        experts = expert_parameters(model, self.anatomy)
        others = (p for p in model.parameters() if not any(p is e for e in experts.values()))
        if any(map(pieces.distributed, others)):
            raise NotApplicable(
                f"from_pretrained of transformers {checkpoint.version()} has sharded more than the "
                "experts: nothing is left for fully_shard by hand"
            )
        if self.trial.wrapper.param_dtype:
            dtype = getattr(torch, self.trial.wrapper.param_dtype)
            for block in self.anatomy.blocks:
                computing_in(dtype, getattr(block.module, "experts"))  # noqa: B009
            self.notes.append(CAST.format(self.trial.wrapper.param_dtype))
        return super().wrap(model)

    def mesh(self) -> DeviceMesh:
        device = "cuda" if self.trial.on_gpu else "cpu"
        return init_device_mesh(device, (self.trial.world_size,), mesh_dim_names=(str(DP_SHARD),))

    def left_out(self, model: nn.Module) -> Dict[str, Any]:
        from torch.distributed.fsdp import fully_shard

        if "ignored_params" not in inspect.signature(fully_shard).parameters:
            raise NotApplicable(f"fully_shard of torch {torch.__version__} has no ignored_params")
        experts = expert_parameters(model, self.anatomy)
        return {"ignored_params": set(experts.values())}


class Accelerated(Wrapped):
    """Calls ``Accelerator.prepare`` on model and optimizer with its FSDP2 plugin."""

    accelerator: Any = None

    def wrap(self, model: nn.Module) -> nn.Module:
        self.accelerator = accelerator(self.trial, self._experts(model), self._layer_class())
        if self.device.type == "cpu":
            self.notes.append(ACCELERATE_ON_CPU)
        parameters = [p for p in model.parameters() if p.requires_grad]
        base = optimizers.build(parameters, self.trial.step)
        prepared, self._prepared_optimizer = self.accelerator.prepare(model, base)
        wrapped: nn.Module = prepared
        return wrapped

    def _experts(self, model: nn.Module) -> Optional[List[nn.Module]]:
        if not self.trial.wrapper.ignore_experts:
            return None
        return [getattr(block.module, "experts") for block in self.anatomy.blocks]  # noqa: B009

    def _layer_class(self) -> str:
        return type(self.anatomy.layers[0][1]).__name__

    def make_optimizer(self) -> None:
        self.optimizer = self._prepared_optimizer

    def accumulating(self, last: bool) -> ContextManager[Any]:
        if last or self.trial.step.accumulate_sync:
            return contextlib.nullcontext()
        context: ContextManager[Any] = self.accelerator.no_sync(self.model)
        return context

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, limit: float) -> Optional[float]:
        """Clips by accelerate's own function, unless the trial requests an unreleased one."""
        if self.trial.step.clipping not in ("torch", "accelerate"):
            return super().clip(limit)
        norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def launch_environment(trial: Trial) -> None:
    """Sets the variables of ``accelerate launch``. from_pretrained reads them too, and lets rank 0
    load alone in RAM-efficient mode. Call it before loading."""
    if trial.wrapper.kind != "accelerate":
        return
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    os.environ["FSDP_VERSION"] = "2"
    ram = str(trial.wrapper.cpu_ram_efficient_loading).lower()
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = ram


def only_rank_0_loads(trial: Trial) -> bool:
    """Whether the other ranks' parameters are empty after from_pretrained, by design: rank 0
    broadcasts while the model is prepared."""
    return trial.wrapper.kind == "accelerate" and trial.wrapper.cpu_ram_efficient_loading


def accelerator(trial: Trial, ignored: Optional[List[nn.Module]], layer_class: str) -> Any:
    """Returns an Accelerator with the trial's FSDP2 plugin. Raises NotApplicable."""
    try:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
        from accelerate.utils import DistributedType
    except ImportError as error:
        raise NotApplicable("this stack has no accelerate") from error
    if "fsdp_version" not in inspect.signature(FullyShardedDataParallelPlugin).parameters:
        import accelerate

        raise NotApplicable(f"accelerate {accelerate.__version__} has no FSDP2")
    spec = trial.wrapper
    plugin: Any = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[layer_class],
        reshard_after_forward=spec.reshard_after_forward,
        cpu_ram_efficient_loading=spec.cpu_ram_efficient_loading,
        ignored_modules=ignored,
        **_saved_as(trial),
    )
    on_cpu = not trial.on_gpu
    made: Any = Accelerator(cpu=on_cpu, fsdp_plugin=plugin)
    if on_cpu:
        made.state.distributed_type = DistributedType.FSDP
        # Code that requests the state again (like save_state) copies it from here.
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        made.state.fsdp_plugin = plugin
    return made


def _saved_as(trial: Trial) -> Dict[str, str]:
    """Returns the state dict type for save_state; without a save, the plugin's own choice."""
    if not isinstance(trial.task, ResumeTask):
        return {}
    return {"state_dict_type": f"{trial.task.state_dict.upper()}_STATE_DICT"}


_ALONE = "transformers"
# Wrapper kind -> the axes that from_pretrained may divide the model along with it, its class.
_KINDS: Dict[str, Tuple[Tuple[Axis, ...], Type[Wrapped]]] = {
    _ALONE: ((EP, TP), Transformers),
    "fsdp2": ((EP,), ExpertsLeftOut),
    "accelerate": ((EP,), Accelerated),
}


def kind(trial: Trial) -> Type[Wrapped]:
    """Returns the class for an axis that from_pretrained divides the model along. Raises
    NotApplicable for a wrapper that does not support it, for two such axes, and if gloo turns
    FSDP2's means into sums."""
    wrapper = trial.wrapper
    axes = [axis for axis in Layout(trial.layout).active if axis.by_loading]
    known, class_ = _KINDS.get(wrapper.kind, ((), None))
    if class_ is None:
        raise NotApplicable(f"wrapper {wrapper.kind} has no mesh axis {', '.join(axes) or EP}")
    if wrapper.distributed_config is None:
        foreign = [axis for axis in axes if axis not in known]
        if foreign:
            raise NotApplicable(
                f"wrapper {wrapper.kind} has no mesh axis {', '.join(foreign)}; kind {_ALONE} has"
            )
        if len(axes) > 1:
            raise NotApplicable(f"{_ALONE} has no mesh axis {axes[1]} beside {axes[0]}")
    fsdp = wrapper.kind != _ALONE or wrapper.native_fsdp
    if fsdp and fsdp2_internals.sums_for_means(trial.backend):
        raise NotApplicable(f"FSDP2 by wrapper {wrapper.kind} on gloo needs torch >= 2.9")
    return class_
