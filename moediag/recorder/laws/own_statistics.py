"""Records, at checked steps, buffers that follow samples and take part in training: those of
modules without parameters that return a tensor like their input, as normalizers do; what a codebook
counts; biases by which a router chooses.

statistics  step values{name: [sketch, elements]}
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Tuple

import torch

from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext, several_ranks
from moediag.recorder.modules import Handles, Hook
from moediag.recorder.step.numbers import Fingerprints, capturing

WATCHER = "laws of statistics"
_NAMED = re.compile(r"cluster_size|(expert|correction|router|routing|gate)_bias$")
_MOST = 64  # modules
_MOST_ELEMENTS = 1 << 20  # of a buffer
_ENOUGH = 6  # the step from which on no module is looked at for the first time


class OwnStatistics:
    """Knows the modules that register a buffer, and which of them change samples."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._modules = ByObject()  # module -> its class and its number among those of the class
        self._numbers: Dict[str, int] = {}
        self._elements = ByObject()  # module -> elements of a sample that it changes
        self._hooked = ByObject()
        self._handles = Handles()
        registering = context.around(WATCHER, self._registers)
        context.recorder.patches.replace(torch.nn.Module, "register_buffer", registering)
        context.recorder.on_uninstall.append(self._handles.remove_all)
        context.on_step.append(self._write)

    def _registers(self, module: Any, _frame: Any) -> None:
        kind = type(module).__name__
        ours = type(module).__module__.startswith("torch.") or "batchnorm" in kind.lower()
        if not ours and self._modules.get(module) is None and len(self._numbers) < _MOST:
            self._numbers[kind] = self._numbers.get(kind, 0) + 1
            if self._numbers[kind] <= _MOST:
                self._modules.set(module, f"{kind} {self._numbers[kind]}")

    def _ran(self, _recorder: Any, module: Any, args: Any, result: Any) -> None:
        given = args[0] if args else None
        alike = isinstance(given, torch.Tensor) and isinstance(result, torch.Tensor)
        alike = alike and given.is_floating_point() and result.is_floating_point()
        if alike and given.shape == result.shape and given.dim() > 1 and len(given):
            self._elements.set(module, given[0].numel())

    def _write(self, step: int) -> None:
        if capturing() or not several_ranks():
            return
        modules = self._modules.owners()
        if step >= _ENOUGH:
            self._handles.remove_all()
        else:
            self._follow(modules)
        sent, prints = self._context.sets.sent_buffers(), Fingerprints()
        found: List[Tuple[str, int]] = []
        for module in modules:
            place = self._context.recorder.module_names.get(module)
            place = self._modules.get(module) if place is None else place
            named = any(map(_NAMED.search, module._buffers))
            most = _MOST_ELEMENTS if named else self._elements.get(module) or 0
            for name, buffer in module._buffers.items() if id(module) not in sent else ():
                if type(buffer) is torch.Tensor and 0 < buffer.numel() <= most:
                    prints.add_sketch(len(found), buffer)
                    found.append((f"{place}.{name}".lstrip("."), buffer.numel()))
        read = prints.sketches()
        values = {name: [read[at], n] for at, (name, n) in enumerate(found) if at in read}
        if values:
            self._context.log.event("statistics", step=step, values=values)

    def _follow(self, modules: List[Any]) -> None:
        """Sees the forward of modules without parameters that nothing compiles."""
        models = self._context.models()
        compiled = {id(one) for model in models if model.compiled for one in model.modules}
        for module in modules:
            new = self._hooked.get(module) is None and id(module) not in compiled
            if new and next(module.parameters(), None) is None:
                self._hooked.set(module, True)
                self._handles.append(module.register_forward_hook(Hook(self._ran)))
