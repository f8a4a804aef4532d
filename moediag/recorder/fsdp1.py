"""Records the parameters of each FSDP1 collective: always the whole flat parameter of a handle."""

from __future__ import annotations

import importlib
import json
import weakref
from typing import Any, Dict, List, Optional, Tuple

import torch

from moediag.protocol.names import plain_name
from moediag.recorder.core import ByObject, CarriedParameters, Recorder

WATCHER = "FSDP1 parameters"
_MODULE = "torch.distributed.fsdp._runtime_utils"


def install(recorder: Recorder) -> None:
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        recorder.note_not_seen(f"which parameters FSDP1's collectives carry: {error}")
        return
    fsdp = Fsdp1(recorder)
    carrying = recorder.carrying(WATCHER, fsdp.carried)
    present = [
        recorder.patches.replace(module, name, carrying)
        for name in ("_unshard", "_reduce_grad", "_reduce_grad_no_shard")
    ]
    if not all(present):
        recorder.note_not_seen("which parameters FSDP1's collectives carry, in part")


class Fsdp1:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known = ByObject()  # handle -> (number of observed roots, phase) -> CarriedParameters
        self._states = ByObject()  # handle -> weak reference to the state (module) that owns it
        recorder.fsdp1_handles = self.handles

    def handles(self) -> List[Tuple[Any, Any]]:
        """Returns (state, handle) of each handle that was used; state: None if it is gone."""
        return [(self._states.get(handle)(), handle) for handle in self._states.owners()]

    def carried(self, state: Any, handle: Any, *_: Any, **__: Any) -> Optional[CarriedParameters]:
        """What the collectives of a handle carry."""
        if handle is None:
            return None
        if self._states.get(handle) is None:
            self._states.set(handle, weakref.ref(state))
        return self._describe(handle)

    def _describe(self, handle: Any) -> CarriedParameters:
        recorder = self._recorder
        phase = recorder.phase_of(handle._training_state)
        key = (len(recorder.roots), phase)
        of_handle: Dict[Any, CarriedParameters] = self._known.setdefault(handle, {})
        known = of_handle.get(key)
        if known is None:
            flat = handle.flat_param
            module = recorder.module_names.get(handle._fully_sharded_module) or ""
            prefix = module + "." if module else ""
            names = recorder.log.names(tuple(plain_name(prefix + fqn) for fqn in flat._fqns))
            shapes = [torch.Size(shape).numel() for shape in flat._shapes]
            sizes = "[" + ",".join(map(str, shapes)) + "]"
            known = of_handle[key] = CarriedParameters(
                json.dumps(module), phase, names, names, sizes
            )
        return known
