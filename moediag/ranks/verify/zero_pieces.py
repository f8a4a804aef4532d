"""What a rank holds of each parameter under DeepSpeed's ZeRO: a run of its elements, as a part of a
flat tensor that the optimizer updates and whose gradient is reduced."""

from __future__ import annotations

from typing import Any, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist

from moediag.recorder.step.pieces import local


class Run(NamedTuple):
    """A run of elements of one parameter."""

    shape: Tuple[int, ...]  # of the parameter
    at: int  # its first element in the parameter
    flat: Any  # what the optimizer has; None: the parameter is frozen
    begin: int  # its first element in ``flat``
    size: int
    words: str  # the stage, and which part the rank holds

    def of(self, flat: Any) -> torch.Tensor:
        return local(flat).reshape(-1)[self.begin : self.begin + self.size]


def run_of(optimizer: Any, parameter: Any) -> Optional[Run]:
    """Returns what this rank has of a parameter, of size 0 if others have all of it; None if
    ``optimizer``, that of the engine, holds no part of it apart."""
    if hasattr(parameter, "ds_tensor"):
        return _of_stage_3(optimizer, parameter)
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if flats is None or not hasattr(parameter, "_hp_mapping"):
        return None
    shape, mapping = tuple(parameter.shape), parameter._hp_mapping
    if mapping is None:
        return Run(shape, 0, None, 0, 0, "")
    inside, at = mapping.hp_fragment_address, mapping.lp_fragment_address.start
    flat = flats[mapping.param_group_index]
    return Run(shape, at, flat, inside.start, inside.numel, "a part by ZeRO")


def _of_stage_3(optimizer: Any, parameter: Any) -> Run:
    part, group = parameter.ds_tensor, parameter.ds_process_group
    at = dist.get_rank(group) * part.ds_numel
    size = max(0, min(part.ds_numel, parameter.ds_numel - at))
    position = optimizer.grad_position.get(optimizer.get_param_id(parameter))
    words = f"ZeRO-3 part {dist.get_rank(group)} of {dist.get_world_size(group)}"
    flat, begin = None, 0
    if position is not None:
        flat, begin = optimizer.fp32_partitioned_groups_flat[position[0]], position[1]
    return Run(tuple(parameter.ds_shape), at, flat, begin, size, words)


def copies(parameter: Any, run: Run) -> Iterator[torch.Tensor]:
    """Yields the other tensors with these elements: those that the model computes with."""
    if hasattr(parameter, "ds_tensor"):
        yield local(parameter.ds_tensor).reshape(-1)[: run.size]
    whole = local(parameter).reshape(-1)
    if whole.numel() == torch.Size(run.shape).numel():
        yield whole[run.at : run.at + run.size]


def holds(module: Any) -> bool:
    """Whether the model is under ZeRO."""
    optimizer = getattr(module, "optimizer", None)
    flats: List[str] = ["single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"]
    return type(module).__name__ == "DeepSpeedEngine" and any(hasattr(optimizer, f) for f in flats)
