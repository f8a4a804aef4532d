"""The few places of FSDP2's inside that the worker and the fixes reach into, for torch 2.6 on."""

from __future__ import annotations

from typing import Any, List

from torch import nn


def parameter_groups(model: nn.Module) -> List[Any]:
    """Every FSDPParamGroup below ``model``, outermost first; empty without FSDP2."""
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
