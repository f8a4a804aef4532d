"""Records which parameters an FSDP2 collective carries.

``fully_shard`` communicates parameters in groups: an all-gather carries the whole group, a
reduce-scatter only the parameters that have a gradient
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py). The functions that issue them take the
carried parameters as their first argument; the group methods that call them identify the group and
its state.
"""

from __future__ import annotations

import importlib
import json
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from moediag.protocol.names import plain_name
from moediag.recorder.core import ByObject, CarriedParameters, Recorder

WATCHER = "FSDP2 parameters"
_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def install(recorder: Recorder) -> None:
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        recorder.note_not_seen(f"which parameters FSDP2's collectives carry: {error}")
        return
    fsdp = Fsdp2(recorder)
    carrying = recorder.carrying(WATCHER, fsdp.carried)
    wanted = [
        (module.FSDPParamGroup, "unshard", fsdp.inside_group),
        (module.FSDPParamGroup, "post_backward", fsdp.inside_group),
        (module, "foreach_all_gather", carrying),
        (module, "foreach_reduce", carrying),
    ]
    absent = [
        name for owner, name, make in wanted if not recorder.patches.replace(owner, name, make)
    ]
    if absent:
        recorder.note_not_seen(
            "which parameters FSDP2's collectives carry: this torch has no " + ", ".join(absent)
        )


class Fsdp2:
    """Tracks the group whose method is running, and describes what its collectives carry."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # Group -> number of observed roots -> (module, of, {carried ids: (carries, sizes)}).
        # Carried parameters live as long as their group.
        self._known = ByObject()
        recorder.fsdp2_groups = self._known.owners

    def inside_group(self, original: Any) -> Callable[..., Any]:
        """Wraps a method of FSDPParamGroup."""
        recorder = self._recorder

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not recorder.active:
                return original(self, *args, **kwargs)
            thread = recorder.thread
            held = thread.fsdp_group
            thread.fsdp_group = self
            try:
                return original(self, *args, **kwargs)
            finally:
                thread.fsdp_group = held

        method.__name__ = getattr(original, "__name__", "method")
        return method

    def carried(self, fsdp_params: Any, *_: Any, **__: Any) -> Optional[CarriedParameters]:
        """What the collectives for ``fsdp_params`` carry."""
        group = self._recorder.thread.fsdp_group
        return None if group is None else self._describe(group, fsdp_params)

    def _describe(self, group: Any, carried: Any) -> CarriedParameters:
        by_roots = self._known.setdefault(group, {})
        roots = len(self._recorder.roots)
        if roots not in by_roots:
            by_roots[roots] = self._learn(group)
        module, of, sets = by_roots[roots]
        ids = tuple(map(id, carried))
        wire = sets.get(ids)
        if wire is None:
            if len(sets) > 256:
                sets.clear()
            names = tuple(self._fqn(parameter) for parameter in carried)
            sizes = "[" + ",".join(str(_numel(parameter)) for parameter in carried) + "]"
            wire = sets[ids] = (self._recorder.log.names(names), sizes)
        return CarriedParameters(
            module, self._recorder.phase_of(group._training_state), wire[0], of, wire[1]
        )

    def _learn(self, group: Any) -> Tuple[str, str, Dict[Any, Tuple[str, str]]]:
        names = tuple(self._fqn(parameter) for parameter in group.fsdp_params)
        known = [self._recorder.module_names.get(m) for m in group.modules]
        own = plain_name(group._module_fqn or "")
        module = next((name for name in known if name is not None), own)
        return json.dumps(module), self._recorder.log.names(names), {}

    def _fqn(self, parameter: Any) -> str:
        """The name in the observed root; before a root is observed, FSDP2's own."""
        info = parameter._module_info
        module = self._recorder.module_names.get(info.module)
        if module is None:
            return plain_name(getattr(parameter, "_param_fqn", None) or info.param_name)
        return plain_name(f"{module}.{info.param_name}" if module else info.param_name)


def _numel(parameter: Any) -> int:
    """The number of elements of the unsharded parameter."""
    size = getattr(parameter, "_orig_size", None)
    if size is None:
        size = parameter.sharded_param.shape
    return int(size.numel())
