"""What a rank sends in a step beside FSDP2's calls: tokens, activations and their gradients.

FSDP2's own bytes follow from its units. torch's memory tracker, under which the step runs, makes it
gather a unit of several modules once more than it does without.
"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moediag.axes import DP_REPLICATE
from moediag.protocol import Traffic

_OF_FSDP = ("_allgather_base_", "_reduce_scatter_base_", "allgather_into_tensor_coalesced_",
            "reduce_scatter_tensor_coalesced_")  # fmt: skip
# How often a ring sends (n - 1) / n of the whole tensor, by a part of the operation's name.
_TIMES = (("broadcast", 0), ("all_reduce", 2), ("allreduce", 2), ("gather", 1), ("scatter", 1),
          ("all_to_all", 1), ("alltoall", 1))  # fmt: skip


class Sent(TorchDispatchMode):
    """Counts what this rank sends, by group. ``everyone``: name of the group of all ranks."""

    def __init__(self, everyone: str) -> None:
        super().__init__()
        self._everyone = everyone
        self._found: Dict[str, Traffic] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace == "_c10d_functional" or (
            func.namespace == "c10d" and name not in _OF_FSDP
        ):
            self._note(name, (*args, *(kwargs or {}).values()), result)
        return result

    def _note(self, name: str, args: Tuple[Any, ...], result: Any) -> None:
        times = next((times for part, times in _TIMES if part in name), 0)
        group = next(filter(None, map(_group, args)), None)
        if not times or group is None:
            return
        ranks = dist.get_process_group_ranks(group)
        whole = max(_bytes(part) for part in (*args, result))
        axis = self._everyone
        if len(ranks) < dist.get_world_size():
            axis = str(getattr(group, "group_desc", "")).replace("mesh_", "") or str(ranks)
        if axis == DP_REPLICATE:
            return
        before = self._found.get(axis, Traffic(axis, len(ranks), max(ranks)))
        sent = times * whole * (len(ranks) - 1) // len(ranks)
        self._found[axis] = Traffic(
            axis, len(ranks), max(ranks), before.calls + 1, before.bytes + sent
        )

    def traffic(self) -> List[Traffic]:
        return [one for one in self._found.values() if one.bytes]


def _group(argument: Any) -> Any:
    """Returns the process group that an argument is or names; None for any other argument."""
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except RuntimeError:  # an operation such as a sum
            return None
    if isinstance(argument, str):
        try:
            return dist.distributed_c10d._resolve_process_group(argument)
        except (LookupError, RuntimeError, ValueError):
            return None
    return None


def _bytes(part: Any) -> int:
    if isinstance(part, torch.Tensor):
        return part.numel() * part.element_size()
    return sum(map(_bytes, part)) if isinstance(part, (list, tuple)) else 0
