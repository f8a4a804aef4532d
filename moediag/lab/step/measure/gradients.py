"""Compares gradients with the single-process reference, by parameter, on each rank's shard.

The reference ran in fp32 from the same (possibly rounded) weights;
:mod:`moediag.recorder.step.tensor_error` says when a parameter is wrong.

A mixed-precision trial (parameters in fp32, computed in bf16) has a tighter bound per parameter:
the difference that the reference itself measured when it computed in that type.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional

import torch

from moediag.lab.step.shard.wrapped import Select, Wrapped
from moediag.protocol import GradientError, Multiple
from moediag.protocol.names import clean_fqn
from moediag.recorder.step import pieces
from moediag.recorder.step.tensor_error import Tolerance, multiple

# Mixed precision: allowed error of a gradient as a multiple of the eager loop's own distance from
# fp32. Measured on the eager loop, grouped_mm, batched_mm and the correct Triton kernels: see
# reports/findings/fused-step.md.
TIMES_ROUNDING = 4.0
# Minimum of that distance, as a share of the parameter's largest gradient: one rounding of the
# largest element.
ONE_ROUNDING = {"bfloat16": 2.0**-8}


def compare(
    wrapped: Wrapped,
    reference: Dict[str, Optional[torch.Tensor]],
    held: Optional[Dict[str, List[int]]] = None,
    rounding: Optional[Dict[str, float]] = None,
) -> Dict[str, GradientError]:
    """Compares this rank's gradients with the reference.

    ``reference``: FQN -> full gradient (fp32), or None (equal to zero) if no rank's batch reached
    it. ``held``: for parameters with experts as rows, the actual expert of each local row; used if
    the whole parameter lost rows, so that its placement is meaningless. ``rounding``: of a
    mixed-precision trial's reference, see there. Collective for FSDP1 and DeepSpeed: call it on all
    ranks or on none."""
    tolerance = Tolerance.of(wrapped.trial.model.dtype, reference.values())
    lies = {clean_fqn(name): p for name, p in wrapped.model.named_parameters()}
    errors: Dict[str, GradientError] = {}
    for fqn, local, select in wrapped.gradients():
        full = reference.get(fqn)
        parameter: Any = lies.get(fqn)
        expected = None if full is None else _cut(full, fqn, parameter, select, held or {})
        scale = 0.0 if full is None else float(full.abs().max())
        allowed = None
        if rounding is not None:
            least = ONE_ROUNDING[wrapped.trial.computes_in] * scale
            allowed = TIMES_ROUNDING * max(rounding.get(fqn, 0.0), least)
        found = tolerance.judge(local, expected, scale, allowed)
        errors[fqn] = dataclasses.replace(found, placement=pieces.placement(parameter))
    return errors


def updates(
    wrapped: Wrapped, expected: Dict[str, Any], held: Dict[str, List[int]]
) -> Dict[str, Multiple]:
    """Returns by FQN how far this rank's weights have moved since the start, as a multiple of the
    reference's movement. ``expected``: see reference.compute, with its "moved". Omits a parameter
    without a multiple. Collective for FSDP1."""
    lies = {clean_fqn(name): p for name, p in wrapped.model.named_parameters()}
    found: Dict[str, Multiple] = {}
    for fqn, local, select in wrapped.weights():
        first, last = expected["weights"].get(fqn), expected["moved"].get(fqn)
        if local is None or first is None or last is None:
            continue
        began, ended = (_cut(full, fqn, lies.get(fqn), select, held) for full in (first, last))
        one = multiple(local.float().cpu() - began, ended - began)
        if one is not None:
            found[fqn] = one
    return found


def _cut(
    full: torch.Tensor, fqn: str, parameter: Any, select: Select, held: Dict[str, List[int]]
) -> torch.Tensor:
    """Returns this rank's part of ``full``."""
    if _whole(parameter, full):
        return select(full)
    return _rows(full, held.get(fqn, []), parameter)


def _whole(parameter: Any, full: torch.Tensor) -> bool:
    """Whether the assembled parameter has the correct shape. A plain tensor may be a part of it;
    the wrapper has assembled flattened ones (ZeRO-3)."""
    return not pieces.distributed(parameter) or parameter.shape == full.shape


def _rows(full: torch.Tensor, held: List[int], parameter: Any) -> torch.Tensor:
    """Returns the reference of the experts in the rows; zero for rows of no expert."""
    part = torch.zeros(pieces.local(parameter).shape)
    where, size = pieces.index(parameter), full[0].numel()
    for number, expert in enumerate(held):
        if expert >= 0:
            # Another dimension may be cut as well: then a local row is a part of the expert's.
            row = full[expert].reshape(-1)
            row = row if where is None else row[where[number].reshape(-1) % size]
            part[number] = row.reshape(part[number].shape)
    return part


def inputs(
    wrapped: Wrapped, kept: Dict[str, torch.Tensor], reference: Dict[str, torch.Tensor]
) -> Dict[str, GradientError]:
    """Compares gradients of the MoE blocks' inputs, by the block's FQN. The reference's loss is the
    mean over ranks, unlike a rank's own, so that gradient is ``world_size`` times as large. Empty
    if the wrapper scales the loss in its own way (DeepSpeed, old gloo), and in bfloat16: rounding
    sends single tokens to other experts, and here each token is compared by itself."""
    if wrapped.trial.computes_in != "float32":
        return {}
    if wrapped.trial.wrapper.kind.startswith("zero") or getattr(wrapped, "_divide_by", 1) > 1:
        return {}
    whole = {fqn: gradient * wrapped.trial.world_size for fqn, gradient in reference.items()}
    tolerance = Tolerance.of(wrapped.trial.model.dtype, whole.values())
    return {
        fqn: tolerance.judge(kept[fqn], whole[fqn], float(whole[fqn].abs().max()))
        for fqn in whole
        if fqn in kept and kept[fqn].shape == whole[fqn].shape
    }
