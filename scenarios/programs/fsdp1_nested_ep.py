"""FSDP1 over a model whose experts are sharded over another process group than the rest.

pytorch #149396: the experts are wrapped over the ranks that hold the same ones (expert data
parallelism), the whole over all ranks. ``wrap`` is how they are nested. ``divide`` is what divides
the experts' gradients by the size of the ep axis, which FSDP does not know.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import _init_utils, _wrap_utils
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from moediag.axes import DP_SHARD, EP
from moediag.lab.step.collector import Collector
from moediag.lab.step.shard import dispatch
from moediag.lab.step.shard.data_parallel import FSDP1
from moediag.lab.step.shard.wrapped import Select
from moediag.protocol import ProgramTask

from . import _meshes

OPTIONS: Dict[str, Any] = {
    "wrap": (
        "ignored-modules",
        "auto-wrap",
        "without-assertions",
        "bottom-up",
        "custom-policy",
    ),
    "divide": ("nothing", "gradients", "postdivide-factor", "loss"),
}

REMOVED = (
    "the two checks of FSDP1 against nesting were removed, as in the report: an FSDP module among "
    "ignored_modules, and one below a module that is wrapped by a policy"
)


def run(collector: Collector) -> None:
    """Runs the program. Collective. Raises what FSDP raises."""
    _meshes.run(collector, Nested)


class Nested(FSDP1):
    """Implements the options ``wrap`` and ``divide`` of the trial's program."""

    def wrap(self, model: nn.Module) -> nn.Module:
        assert isinstance(self.trial.task, ProgramTask)
        self.options = self.trial.task.options
        mesh = _meshes.mesh(self.trial)
        self.ep = mesh.size(1)
        self.rows = dispatch.divide(self.anatomy, mesh.get_group(str(EP)))
        self.experts = mesh.get_group(str(DP_SHARD))
        ways = {
            "ignored-modules": self._ignored_modules,
            "auto-wrap": self._auto_wrap,
            "without-assertions": self._without_assertions,
            "bottom-up": self._bottom_up,
            "custom-policy": self._custom_policy,
        }
        wrapped: nn.Module = ways[self.options["wrap"]](model)
        if self.options["divide"] == "postdivide-factor":
            self._postdivide(wrapped)
        return wrapped

    # -- ways to nest ------------------------------------------------------------------

    def _ignored_modules(self, model: nn.Module) -> nn.Module:
        """Wraps experts first, then the rest by a policy that ignores them, as in the report."""
        ignored = [self._wrap_experts(block.module) for block in self.anatomy.blocks]
        asked = self._as_reported(auto_wrap_policy=self._layers(), ignored_modules=ignored)
        return FSDP(model, **asked)

    def _auto_wrap(self, model: nn.Module) -> nn.Module:
        """Does the same without declaring them as ignored."""
        for block in self.anatomy.blocks:
            self._wrap_experts(block.module)
        return FSDP(model, **self._as_reported(auto_wrap_policy=self._layers()))

    def _without_assertions(self, model: nn.Module) -> nn.Module:
        """Wraps as the report did next: removes the checks that raise from torch."""
        self.notes.append(REMOVED)
        with _assertions_removed():
            return self._ignored_modules(model)

    def _bottom_up(self, model: nn.Module) -> nn.Module:
        """Wraps each module by hand, innermost first, so that no check applies."""
        for block in self.anatomy.blocks:
            self._wrap_experts(block.module)
        for fqn, layer in self.anatomy.layers:
            parent, _, name = fqn.rpartition(".")
            setattr(model.get_submodule(parent), name, FSDP(layer, **self._as_reported()))
        return FSDP(model, **self._as_reported())

    def _custom_policy(self, model: nn.Module) -> nn.Module:
        """Uses torch's own way to give one module another process group."""
        layers = {id(layer) for _, layer in self.anatomy.layers}
        experts = {id(_experts(block.module)) for block in self.anatomy.blocks}

        def policy(module: nn.Module) -> Any:
            if id(module) in experts:
                return {"process_group": self.experts}
            return id(module) in layers

        return FSDP(model, **self._as_reported(auto_wrap_policy=CustomPolicy(policy)))

    def _wrap_experts(self, block: nn.Module) -> nn.Module:
        wrapped = FSDP(_experts(block), process_group=self.experts, **self._as_reported())
        setattr(block, "experts", wrapped)  # noqa: B010 - a Module's attribute, to mypy
        return wrapped

    def _layers(self) -> Any:
        return ModuleWrapPolicy({type(layer) for _, layer in self.anatomy.layers})

    def _as_reported(self, **more: Any) -> Dict[str, Any]:
        """Returns the report's arguments of FSDP, and ``more``."""
        return dict(
            sharding_strategy=fsdp.ShardingStrategy.FULL_SHARD,
            forward_prefetch=True,
            backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE,
            limit_all_gathers=True,
            use_orig_params=True,
            device_id=self.device if self.device.type == "cuda" else torch.device("cpu"),
            **more,
        )

    # -- divisors ----------------------------------------------------------------------

    def _postdivide(self, model: nn.Module) -> None:
        """Sets FSDP1's own factor after the reduction, in the instances that hold experts."""
        for module in model.modules():
            state: Any = module
            if getattr(state, "process_group", None) is self.experts:
                state._gradient_postdivide_factor *= self.ep

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / self.ep if self.options["divide"] == "loss" else loss)
        if self.options["divide"] == "gradients":
            for _, parameter in _meshes.expert_parameters(self):
                if parameter.grad is not None:
                    parameter.grad.div_(self.ep)

    # -- what each rank holds ----------------------------------------------------------

    def cut(self, fqn: str) -> Select:
        """Selects the rows of the experts that the ranks of this FSDP group hold together."""
        if fqn not in self.rows:
            return super().cut(fqn)
        first, last = self.rows[fqn]
        return lambda full: full[first:last]


def _experts(block: nn.Module) -> nn.Module:
    found: Any = block
    result: nn.Module = found.experts
    return result


@contextlib.contextmanager
def _assertions_removed() -> Iterator[None]:
    """Disables two checks of torch.distributed.fsdp: ``_get_ignored_modules`` finds no FSDP module
    among the ignored ones, ``_check_nested_wrapping`` does nothing."""
    inside: Any = _init_utils
    around: Any = _wrap_utils
    ignored, nested = inside._get_ignored_modules, around._check_nested_wrapping

    def get_ignored_modules(root: nn.Module, modules: Any) -> Any:
        state_of = inside._get_module_fsdp_state
        unchecked = {id(module) for module in modules or ()}

        def unless_checked(module: nn.Module) -> Any:
            # The check queries each module first; later queries need the answer.
            if id(module) in unchecked:
                unchecked.remove(id(module))
                return None
            return state_of(module)

        inside._get_module_fsdp_state = unless_checked
        try:
            return ignored(root, modules)
        finally:
            inside._get_module_fsdp_state = state_of

    inside._get_ignored_modules = get_ignored_modules
    around._check_nested_wrapping = lambda root: None
    try:
        yield
    finally:
        inside._get_ignored_modules = ignored
        around._check_nested_wrapping = nested
