"""The trial's optimizer, and parameter groups that mix kinds of tensors.

A foreach or fused implementation passes a whole parameter group to one operator. An operator that
gets a plain tensor beside a DTensor raises ``got mixed torch.Tensor and DTensor``; DTensors of
several meshes in one call work in torch 2.13 (each rank updates its own pieces).
"""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, List, Optional

import torch

from moediag.lab.step.shard.declared_slices import mesh_name
from moediag.protocol import StepSpec
from moediag.recorder.not_applicable import NotApplicable

FINDING = "optimizer-group"
_OPTIMIZERS: Dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True)
class GroupFinding:
    """One parameter group whose single call gets more than one kind. ``kinds``: ``plain`` or the
    mesh -> number of parameters; ``raises``: torch refuses it (plain tensors beside DTensors)."""

    group: int
    optimizer: str
    implementation: str
    kinds: Dict[str, int]
    raises: bool

    @property
    def text(self) -> str:
        meshes = {kind: n for kind, n in self.kinds.items() if kind != "plain"}
        parts = [f"{n} DTensors on mesh {mesh}" for mesh, n in meshes.items()]
        if "plain" in self.kinds:
            parts.insert(0, f"{self.kinds['plain']} plain tensors")
        held = " and ".join([", ".join(parts[:-1]), parts[-1]])
        call = f"{self.optimizer} {self.implementation}=True"
        return f"parameter group {self.group} holds {held}; {call} handles them in one call"


def build(parameters: Iterable[Any], step: StepSpec) -> torch.optim.Optimizer:
    """Returns an optimizer of the trainable ``parameters``. Raises NotApplicable."""
    trained = [p for p in parameters if p.requires_grad]
    if step.optimizer not in _OPTIMIZERS:
        raise NotApplicable(f"unknown optimizer {step.optimizer!r}")
    options: Dict[str, Any] = {"lr": step.lr}
    options.update(
        {k: v for k, v in (("foreach", step.foreach), ("fused", step.fused)) if v is not None}
    )
    grouped = per_mesh(trained) if step.parameter_groups == "per-mesh" else [trained]
    return _OPTIMIZERS[step.optimizer]([{"params": group} for group in grouped], **options)


def per_mesh(parameters: Iterable[Any]) -> List[List[Any]]:
    """Groups plain tensors, and the DTensors of each mesh, in the order of first appearance."""
    groups: Dict[str, List[Any]] = {}
    for parameter in parameters:
        groups.setdefault(mesh_name(parameter), []).append(parameter)
    return list(groups.values())


def findings(optimizer: Any) -> List[GroupFinding]:
    """Returns parameter groups that one foreach or fused call gets although they mix kinds. Empty
    for anything but a torch optimizer."""
    optimizer = unwrapped(optimizer)
    if optimizer is None:
        return []
    found = []
    for index, group in enumerate(optimizer.param_groups):
        kinds = Counter(mesh_name(p) for p in group["params"] if p.requires_grad)
        used = implementation(optimizer, group)
        if len(kinds) < 2 or used == "single-tensor":
            continue
        raises = "plain" in kinds
        found.append(GroupFinding(index, type(optimizer).__name__, used, dict(kinds), raises))
    return found


def unwrapped(optimizer: Any) -> Optional[torch.optim.Optimizer]:
    """Returns torch's optimizer inside AcceleratedOptimizer; None for another kind (DeepSpeed)."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def implementation(optimizer: torch.optim.Optimizer, group: Dict[str, Any]) -> str:
    """Returns what the step will run for ``group``: ``fused``, ``foreach`` or ``single-tensor``. If
    the user requested neither, torch uses foreach when every parameter is on an accelerator (the
    rule of ``torch.optim.optimizer._default_to_fused_or_foreach``, torch 2.0 on)."""
    if group.get("fused"):
        return "fused"
    foreach = group.get("foreach")
    if foreach is None and "foreach" in group and group.get("fused") is None:
        foreach = _torch_takes_foreach(group["params"], bool(group.get("differentiable")))
    return "foreach" if foreach else "single-tensor"


def _torch_takes_foreach(parameters: List[Any], differentiable: bool) -> bool:
    # torch.optim deletes its own submodule's name.
    module = importlib.import_module("torch.optim.optimizer")
    choose: Any = getattr(module, "_default_to_fused_or_foreach", None)
    if choose is not None:
        return bool(choose(parameters, differentiable, use_fused=False)[1])
    return not differentiable and all(p.device.type == "cuda" for p in parameters)
