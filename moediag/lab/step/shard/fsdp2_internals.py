"""FSDP2 internals that the worker and the fixes use, for torch 2.6 and later, and patches for old
torch releases so that FSDP2 trains on the CPU."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, List, Tuple

import torch
from torch import nn

OLD_STREAMS = (
    "FSDP2 of this torch does not run on the CPU as released: torch.cpu.Stream lacks {}, and "
    "gathering again counts as a change of what backward saved; both were filled in as in 2.7"
)
OLD_GLOO = (
    "gloo's reduce_scatter of this torch adds where FSDP2 asks for the mean: the loss is divided "
    "by the {} ranks of the shard group before backward instead"
)


def release() -> Tuple[int, int]:
    """Returns major and minor version of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def prepare_cpu() -> List[str]:
    """Makes torch 2.6's FSDP2 train on the CPU; returns a note on any change. It calls methods that
    ``torch.cpu.Stream``, a class that does nothing, got in 2.7 (where they do nothing), and lacks
    2.7's guard of version counters in ``foreach_all_gather_copy_out``. For models on the CPU only:
    the patch must not touch a real stream."""
    stream: Any = torch.cpu.Stream
    absent = [name for name in ("record_event", "wait_event") if not hasattr(stream, name)]
    if not absent:
        return []
    for name in absent:
        setattr(stream, name, lambda self, event=None: event)
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    module.foreach_all_gather_copy_out = _same_version(module.foreach_all_gather_copy_out)
    return [OLD_STREAMS.format(" and ".join(absent))]


def _same_version(copy_out: Any) -> Any:
    def function(result: Any, fsdp_params: Any, *rest: Any) -> Any:
        with contextlib.ExitStack() as kept:
            for parameter in fsdp_params:
                # On the first call there are none, and none were saved yet.
                for output in getattr(parameter, "all_gather_outputs", ()):
                    kept.enter_context(torch.autograd._unsafe_preserve_version_counter(output))
            return copy_out(result, fsdp_params, *rest)

    return function


def sums_for_means(backend: str) -> bool:
    """Whether reduce_scatter silently returns the sum where FSDP2 requests the mean: gloo before
    torch 2.9 (measured: 2.6.0, 2.7.1 and 2.8.0 do, 2.9.1 does not)."""
    return backend == "gloo" and release() < (2, 9)


def parameter_groups(model: nn.Module) -> List[Any]:
    """Returns every FSDPParamGroup below ``model``, outermost first; empty without FSDP2."""
    groups: List[Any] = []
    for module in model.modules():
        state_of = getattr(module, "_get_fsdp_state", None)
        if state_of is None:
            continue
        state = state_of()
        # torch 2.13 has a list (one group per mesh), older releases one or none.
        listed = getattr(state, "_fsdp_param_groups", None)
        if listed is None:
            one = getattr(state, "_fsdp_param_group", None)
            listed = [one] if one is not None else []
        groups.extend(listed)
    return groups
