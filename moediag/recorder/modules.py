"""Tracks where in the model a rank is, without changes to the model.

A global forward pre-hook finds each root: the first called module that has parameters. The modules
of a root get names; its decoder layers and MoE blocks get hooks. The global hook is removed after
the first step, so later steps pay only for a few modules.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
import weakref
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
from torch.nn.modules import module as torch_module

from moediag.protocol.names import plain_name
from moediag.recorder.core import Block, Recorder
from moediag.recorder.parameter_names import parameters_of
from moediag.recorder.routing import expert_counts, tokens_of
from moediag.recorder.step.numbers import traced

WATCHER = "modules"
# Wrappers that only forward, with the module that they forward to; their parameter names start
# with its name.
_OUTER = {
    "DistributedDataParallel": "module", "DataParallel": "module", "DeepSpeedEngine": "module",
    "FullyShardedDataParallel": "module", "_FabricModule": "_forward_module",
}  # fmt: skip
_LAYER = re.compile(r"(^|\.)[A-Za-z_]+\.\d+$")  # an element of a list: model.layers.3
_COMPILE_WARNING = r"Using `torch.compile\(module\)` when there are global hooks"
_FIRST_ROOTS = 8  # limit, for jobs with many small models
_MOST_FRAMES = 16  # above the call of a root
_MOST_AGAIN = 8  # times that the search begins again

# The recorder whose hooks are on modules. Hooks are module-level functions that look it up: copying
# or pickling a model must not reach the recorder's files and locks.
_recorder: Optional[Recorder] = None
_in_backward = torch._C._current_graph_task_id
_blocks: Dict[int, Tuple[Any, str, Tuple[int, ...]]] = {}  # id -> (weak module, fqn, experts)


class Hook:
    """A hook that pickles as a no-op: a saved model must load without moediag."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        if traced():
            return
        if _recorder is not None and _recorder.active:
            try:
                self.function(_recorder, *args)
            except Exception as error:
                _recorder.fault(WATCHER, error)

    def __deepcopy__(self, memo: Any) -> "Hook":
        return self

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


class Handles(List[Any]):
    """Handles of hooks."""

    def remove_all(self) -> None:
        """Removes the hooks."""
        while self:
            self.pop().remove()


class Observer:
    """Finds roots and hooks their blocks; :meth:`remove` removes all hooks."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._roots = 0
        self._found = 0  # roots since the global hook was last installed
        self._again = 0  # how often it was installed again
        self._handles = Handles()
        self._global: Optional[Any] = None
        self._filter: Any = None
        self._first_step = recorder.current_step
        self._stepped_in: Any = None  # the running outermost forward in which an optimizer stepped

    def install(self) -> None:
        global _recorder
        _recorder = self._recorder
        self._arm()
        self._recorder.look_for_models = self.again
        self._recorder.hooks.before_step(self._steps)
        self._recorder.on_uninstall.append(self.remove)

    def again(self) -> None:
        """Looks for roots for two more steps: a model was wrapped, or an optimizer steps on one
        that was not seen running."""
        if self._global is None and self._again < _MOST_AGAIN and self._roots < _FIRST_ROOTS:
            self._again += 1
            self._found, self._first_step = 0, self._recorder.current_step
            self._arm()

    def _steps(self, optimizer: Any, _closure: bool, _frame: Any) -> None:
        """A module in whose forward an optimizer steps on its parameters, again and again, is a
        loop of training: the models that it calls are looked for."""
        recorder, blocks = self._recorder, self._recorder.thread.blocks
        outer = blocks[0] if blocks and _in_backward() == -1 else None
        if outer is None or outer is not self._stepped_in:
            self._stepped_in = outer
            return
        owned = set(map(id, parameters_of(optimizer)))
        for root in recorder.models.owners():
            known = _blocks.get(id(root))
            running = known is not None and known[1] == outer.fqn and recorder.models.get(root)
            if running and any(id(parameter) in owned for parameter in root.parameters()):
                del _blocks[id(root)]
                recorder.models.set(root, False)
                blocks.clear()
                self._disarm()
                self.again()
                return

    def _arm(self) -> None:
        self._global = torch_module.register_module_forward_pre_hook(Hook(self._before_any))
        # A compiled module warns about global hooks; this one is removed before tracing.
        warnings.filterwarnings("ignore", message=_COMPILE_WARNING)
        self._filter = warnings.filters[0]

    def remove(self) -> None:
        global _recorder
        self._disarm()
        self._handles.remove_all()
        _blocks.clear()
        if _recorder is self._recorder:
            _recorder = None

    def _disarm(self) -> None:
        if self._global is not None:
            self._global.remove()
            self._global = None
            if self._filter in warnings.filters:
                warnings.filters.remove(self._filter)  # type: ignore[attr-defined]

    def _before_any(self, recorder: Recorder, module: Any, args: Any) -> None:
        """The global hook; cheap for modules inside a running root."""
        if recorder.thread.blocks:
            return
        steps = recorder.current_step - self._first_step
        if (self._found and (recorder.stepped or steps > 0)) or (self._again and steps > 1):
            self._disarm()  # the first step is over
            return
        if recorder.models.get(module):
            return
        if torch._C._current_graph_task_id() != -1:
            return  # part of a model, recomputed in the backward
        if next(module.parameters(), None) is None:
            return  # a loss or a metric
        self._observe(module, args)
        if self._roots >= _FIRST_ROOTS:
            self._disarm()

    def _observe(self, root: Any, args: Any) -> None:
        recorder = self._recorder
        known = _is_hooked(root)  # as a part of a model that was seen
        recorder.models.set(root, True)
        self._roots += 1
        self._found += 1
        inner = unwrapped(root)
        caller: Any = sys._getframe(3)  # torch's, of this global hook, which gets no kwargs
        whole = _caller_of(root, caller)
        if whole is not None and recorder.module_names.get(whole) is None:
            recorder.roots.append(("", weakref.ref(whole)))
            for name, module in whole.named_modules():
                recorder.module_names.setdefault(module, plain_name(name))
        prefix = _name_in_known_root(recorder, inner)
        recorder.roots.append((prefix, weakref.ref(inner)))
        compiled = False
        inside_moe: Optional[str] = None
        # Hook the outermost of equal names: a wrapper's forward contains the wrapped one.
        hooked: Set[str] = set()
        for name, module in inner.named_modules():
            fqn = plain_name(prefix + name + ".")[:-1]
            recorder.module_names.setdefault(module, fqn)
            compiled = compiled or hasattr(module, "_orig_mod")
            compiled = compiled or getattr(module, "_compiled_call_impl", None) is not None
            if inside_moe is not None and fqn.startswith(inside_moe):
                continue  # experts are not layers
            experts = expert_counts(module)
            if experts:
                inside_moe = fqn + "."
            # The model in a wrapper may be called by itself, as in an evaluation on one rank.
            outermost = fqn == prefix or (module is root and whole is not None)
            if (experts or outermost or _LAYER.search(fqn)) and fqn not in hooked:
                hooked.add(fqn)
                self._hook(module, fqn, experts)
        if inner is not root:
            self._hook(root, prefix, ())
        if compiled:
            self._disarm()  # dynamo specialises on the presence of global hooks
            recorder.note_not_seen("tokens per expert and modules inside torch.compile'd code")
        if recorder.on_forward:
            hook = Hook(_tell_forward)
            self._handles.append(root.register_forward_pre_hook(hook, with_kwargs=True))
        if not known:  # the root's own pre-hooks were added too late for the running call
            _enter(recorder, root, ())
        _tell_forward(recorder, root, args, caller.f_locals.get("kwargs") or {})

    def _hook(self, module: Any, fqn: str, experts: Tuple[int, ...]) -> None:
        if _is_hooked(module):
            return  # it is in a model that was seen before it was wrapped again
        _blocks[id(module)] = (weakref.ref(module), fqn, experts)
        # Run before and after FSDP's hooks: what they issue belongs to the module, too.
        self._handles.append(module.register_forward_pre_hook(Hook(_enter), prepend=True))
        self._handles.append(module.register_forward_hook(Hook(_leave), always_call=True))


def _is_hooked(module: Any) -> bool:
    known = _blocks.get(id(module))
    return known is not None and known[0]() is module


def unwrapped(root: Any) -> Any:
    """The model inside its wrappers."""
    while (at := _OUTER.get(type(root).__name__)) is not None and hasattr(root, at):
        root = getattr(root, at)
    return root


def _caller_of(root: Any, frame: Any) -> Any:
    """The outermost model with more parameters of which a method called ``root``, a part of it, in
    place of its own forward; None without one. A trainer, which has wrappers in it, is none."""
    found, own = None, sum(1 for _ in root.parameters())
    for _ in range(_MOST_FRAMES):
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and owner is not root and owner is not found:
            inside = list(owner.modules())
            if any(one is root for one in inside):
                wraps = any(type(one).__name__ in _OUTER for one in inside)
                more = sum(1 for _ in owner.parameters()) > own
                found = owner if more and not wraps else found
        frame = frame.f_back
        if frame is None:
            break
    return found


def _name_in_known_root(recorder: Recorder, module: Any) -> str:
    known = recorder.module_names.get(module)
    return known + "." if known else ""


def _enter(recorder: Recorder, module: Any, _args: Any) -> None:
    known = _blocks.get(id(module))
    if known is None or known[0]() is not module:
        return
    blocks = recorder.thread.blocks
    in_backward = _in_backward() != -1
    if not blocks and not in_backward:
        _new_forward(recorder)
    blocks.append(Block(known[1], known[2], in_backward))


def _tell_forward(recorder: Recorder, root: Any, args: Any, kwargs: Any) -> None:
    """Reports a forward with gradients, unless it is recomputed in the backward, that of a part of
    a model that is running, or that of a copy of the model. The step is known by now."""
    if not torch.is_grad_enabled() or _in_backward() != -1 or len(recorder.thread.blocks) > 1:
        return
    for tell in recorder.on_forward if recorder.models.get(root) else ():
        tell(root, args, kwargs)


def _leave(recorder: Recorder, module: Any, *_: Any) -> None:
    """Runs after the forward of ``module``, even if it raised."""
    known = _blocks.get(id(module))
    if known is None or known[0]() is not module:
        return
    blocks = recorder.thread.blocks
    while blocks:  # an exception may have skipped the exit of inner blocks
        block = blocks.pop()
        if block.routed is not None:
            tokens_of(recorder, block)
        if block.fqn == known[1]:
            break


def _new_forward(recorder: Recorder) -> None:
    """Starts an outermost forward: if the optimizer has stepped, a new step begins."""
    recorder.heartbeat.turn()
    recorder.optimizer_running = False
    if recorder.counts_steps and recorder.stepped:
        recorder.stepped = False
        recorder.set_step(recorder.current_step + 1)
