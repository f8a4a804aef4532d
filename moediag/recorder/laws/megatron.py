"""Which parameters Megatron keeps whole on all tensor-parallel ranks, and which it shards.

Those that it shards have the attribute ``tensor_model_parallel``; all others are duplicates
(``param_is_not_tensor_parallel_duplicate`` in Megatron-Core 0.16), except experts, whose attribute
``allreduce`` is False. An optimizer may have a float32 copy of a parameter, its ``main_param``.
"""

from __future__ import annotations

import sys
from typing import Any, Iterable, List, Tuple

# Modules that know the groups, in Megatron-Core and before it.
_GROUPS = ("megatron.core.parallel_state", "megatron.mpu.initialize", "megatron.mpu")


def of_models(models: Iterable[Any]) -> Tuple[List[Tuple[Any, bool]], Any]:
    """Parameters, as the optimizer has them, and whether each is sharded, of models with sharded
    ones; and the tensor-parallel group. Without more than one tensor-parallel rank none."""
    group = _group()
    found: List[Tuple[Any, bool]] = []
    for model in models if group is not None else ():
        own = [(p, bool(getattr(p, "tensor_model_parallel", False))) for p in model.parameters()]
        if any(sharded for _, sharded in own):
            found += [(stepped(p), sharded) for p, sharded in own if getattr(p, "allreduce", True)]
    return found, group


def stepped(parameter: Any) -> Any:
    """What the optimizer has instead of ``parameter``, if that is not a piece; or itself."""
    copy = getattr(parameter, "main_param", None)
    whole = copy is not None and not getattr(parameter, "main_param_sharded", False)
    return copy if whole else parameter


def _group() -> Any:
    for name in _GROUPS:
        state: Any = sys.modules.get(name)
        if state is not None and state.model_parallel_is_initialized():
            group = state.get_tensor_model_parallel_group()
            return group if group is not None and group.size() > 1 else None
    return None
