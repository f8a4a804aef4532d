"""Whether DistributedDataParallel reduces the gradients of what the program trains."""

from __future__ import annotations

import gc
from typing import Any, Dict, List, Set

from moediag.protocol.names import plain_name
from moediag.protocol.outcome import BARE, NO_SYNC, REPLACED

_WRAPPER = "DistributedDataParallel"


class Reduction:
    """Watches the forwards of one step."""

    def __init__(self) -> None:
        self._called: Set[int] = set()
        self._synced: Set[int] = set()

    def forward(self, module: Any) -> None:
        """``module`` is called by the program."""
        self._called.add(id(module))
        if type(module).__name__ == _WRAPPER and module.require_backward_grad_sync:
            self._synced.add(id(module))

    def found(self) -> Dict[str, List[str]]:
        """Returns what is not reduced, by reason: classes of modules, or names of parameters."""
        found: Dict[str, List[str]] = {}
        for wrapper in [one for one in gc.get_objects() if type(one).__name__ == _WRAPPER]:
            inner = wrapper.module
            if id(inner) in self._called:
                found.setdefault(BARE, []).append(type(inner).__name__)
            if id(wrapper) not in self._called:
                continue
            if id(wrapper) not in self._synced:
                found.setdefault(NO_SYNC, []).append(type(inner).__name__)
            known = {id(p) for p in getattr(wrapper, "_module_parameters", [])}
            ignored = getattr(wrapper, "parameters_to_ignore", ())
            for name, parameter in inner.named_parameters():
                unknown = known and parameter.requires_grad and id(parameter) not in known
                if unknown and name not in ignored:
                    found.setdefault(REPLACED, []).append(plain_name(name))
        return found
