"""The modules and parameters of a model, found in one walk for all watchers of a moment."""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Tuple

from moediag.recorder.modules import unwrapped


class ModelParts:
    """What is in ``root``, in torch's order and by torch's names: each module and parameter once,
    by its first name. It keeps the model alive."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.model = unwrapped(root)
        modules: Dict[int, Tuple[str, Any]] = {}
        parameters: Dict[int, Tuple[str, Any]] = {}
        self.names: Dict[int, List[str]] = {}  # id of a parameter -> all its names
        for name, module in root.named_modules(remove_duplicate=False):
            modules.setdefault(id(module), (name, module))
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    full = f"{name}.{key}" if name else key
                    parameters.setdefault(id(parameter), (full, parameter))
                    self.names.setdefault(id(parameter), []).append(full)
        self.named_modules = list(modules.values())
        self.named_parameters = list(parameters.values())
        self.modules = [module for _, module in self.named_modules]
        self.parameters = [parameter for _, parameter in self.named_parameters]

    @functools.cached_property
    def compiled(self) -> bool:
        """Whether torch.compile compiles a part, of which it traces the hooks, too."""
        return any(
            hasattr(one, "_orig_mod") or getattr(one, "_compiled_call_impl", None)
            for one in self.modules
        )

    @functools.cached_property
    def of_model(self) -> List[Tuple[str, Any]]:
        """The modules of the model inside its wrappers, by their names in it."""
        inside = self.model is not self.root
        return list(self.model.named_modules()) if inside else self.named_modules

    def trains(self, owned: Any) -> bool:
        """Whether a parameter has a gradient, or its id is in ``owned``."""
        return any(p.grad is not None or id(p) in owned for p in self.parameters)
