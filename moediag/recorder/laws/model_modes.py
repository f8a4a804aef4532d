"""Records each change between training and evaluation mode of a model that runs with gradients, and
at checked steps whether a model that is being trained runs in training mode, and what else decides
how it computes.

settings    step over[ranks between which its wrapper averages gradients]
            parts[[parts in evaluation mode of a model in training mode, classes of their modules
            that depend on it]]
            of{"what = value": [modules or parameters of which it is true, name of the first one]}
drops       step model(class) module(name of its first dropout) weights(fingerprints of some
            matrices)   of a model that no optimizer trains and that ran without gradients and with
            dropout
no_grad     step modules[whose parameters had no gradient at the last check, and which run without
            gradients inside a forward with gradients]
"""

from __future__ import annotations

import functools
from itertools import islice
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch
from torch.nn.modules import batchnorm, dropout

from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext
from moediag.recorder.modules import Hook, unwrapped
from moediag.recorder.step.numbers import Fingerprints
from moediag.recorder.step.pieces import local

WATCHER = "laws of modes"
_in_backward = torch._C._current_graph_task_id  # -1 outside
MOST_CHANGES = 100  # of one model that are recorded
_MOST_MODULES = 5000  # of a model whose settings are read
_MOST_IDLE = 16  # modules without gradients that are followed
_FEW, _SMALL = 4, 1 << 22  # matrices of a model that does not train, and their elements
# Settings that people write are short; measured numbers, such as a time, are not.
_SHORT = 8


class _Ran:
    """One model in one step."""

    __slots__ = ("changes", "idle", "modes", "now", "number", "parts", "settings", "step", "told")

    def __init__(self, number: int) -> None:
        self.number = number
        self.now: Optional[bool] = None  # the mode of its last forward
        self.changes = 0
        self.step = 0
        self.modes: Set[bool] = set()  # of its forwards with gradients; True: training
        self.told: Set[bool] = set()
        self.settings: Dict[str, List[Any]] = {}  # in the first forward of a checked step
        self.parts: List[Tuple[str, Any]] = []
        # Modules whose parameters had no gradient in the last check, and what they are part of,
        # until its next forward.
        self.idle: List[Tuple[Any, Any]] = []


class ModelModes:
    """A model is trained where an optimizer that steps has a parameter with a gradient of it: the
    teacher of a distillation is not."""

    def __init__(self, context: LawContext, owned: Callable[[], List[Any]]) -> None:
        self._context = context
        self._owned = owned  # parameters of the optimizers that stepped
        self._models = ByObject()  # model -> _Ran
        self._seen = 0  # models so far; a freed one's number is not used again
        self._backwards = 0  # of the running step
        self._hooks: List[Any] = []  # of parts of the model in this step
        # Idle module -> whether it ran with gradients. Where it has its parameters only, and what
        # it is part of reads them, it does not run.
        self._graded: Dict[str, bool] = {}
        self._read: Dict[str, bool] = {}  # whether what it is part of did
        # Hooks on the first dropout of models that do not train, and the ids of those that ran.
        self._waiting: List[Any] = []
        self._dropped: Set[int] = set()

    def install(self) -> None:
        context = self._context
        context.forward.add(WATCHER, self._called)
        context.after_backward.add(WATCHER, self._counted)
        context.after_step.add(WATCHER, self._stepped)
        context.recorder.on_uninstall.append(self._uninstall)
        context.on_check.append(self._write)

    def _called(self, root: Any, *_: Any) -> None:
        step = self._context.recorder.current_step
        ran = self._models.get(root)
        if ran is None:
            ran = self._models.set(root, _Ran(self._seen))
            self._seen += 1
        # Lightning changes the mode of the model and not of the wrapper; some programs put only the
        # parts back.
        model = unwrapped(root)
        training = bool(model.training) or any(
            part.training for part in model.modules() if _depends_on_mode(part)
        )
        if ran.step != step:
            ran.step, ran.modes, ran.told = step, set(), set()
            if self._context.checking:
                ran.settings, ran.parts = _settings(root), list(_in_evaluation(unwrapped(root)))
                self._read_autocast(unwrapped(root), ran.settings)
            self._follow(ran)
        ran.modes.add(training)
        if training != ran.now:
            ran.now = training
            ran.changes += 1
            if ran.changes <= MOST_CHANGES:
                self._context.log.event(
                    "mode_change", keep=True, step=step, model=ran.number, training=training
                )

    def _read_autocast(self, model: Any, settings: Dict[str, List[Any]]) -> None:
        """Where the program replaced the model's forward, as accelerate does to enter autocast in
        it, the state counts in which its first part with parameters runs."""
        parts = list(islice(model.modules(), 1, _MOST_MODULES)) if "forward" in vars(model) else []
        inner = next(
            (p for p in parts if next(p.parameters(recurse=False), None) is not None), None
        )

        def read(*_: Any) -> None:
            if not any(what.startswith("autocast") for what in settings):
                settings[f"autocast = {_autocast() or 'off'}"] = [1, ""]

        self._forget()
        if inner is None or any(map(_is_compiled, parts)):
            read()
        else:
            self._hooks = [inner.register_forward_pre_hook(Hook(read))]

    def _follow(self, ran: _Ran) -> None:
        """Notes until the backward whether idle modules run with gradients: an autograd.Function
        runs its forward without, and gives none to parameters that are not its arguments."""
        idle, ran.idle = ran.idle, []
        names = self._context.recorder.module_names
        for module, whole in idle:
            name = names.get(module)

            def read(*_: Any, name: Any = name, to: Any = None) -> None:
                # What a checkpoint runs again in the backward reads parameters with gradients.
                if _in_backward() == -1 or to is self._read:
                    to[name] = to.get(name, False) or torch.is_grad_enabled()

            for one, to in ((module, self._graded), (whole, self._read)) if name else ():
                hook = Hook(functools.partial(read, to=to))
                self._hooks.append(one.register_forward_pre_hook(hook))

    def _uninstall(self) -> None:
        for one in (*self._hooks, *self._waiting):
            one.remove()

    def _forget(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _write(self, step: int) -> None:
        self._forget()  # a part that did not run
        # An optimizer of inputs, as an attack's, trains no model.
        updated = self._context.updated
        owned = set(map(id, self._owned() if updated is None else updated))
        self._write_drops(step, owned)
        given, self._context.settings = self._context.settings, {}
        given[f"backwards of an update = {self._backwards}"] = 1, ""
        for root in self._models.owners():
            ran = self._models.get(root)
            new = ran.modes - ran.told if ran.step == self._context.recorder.current_step else ()
            if not new or not any(p.grad is not None and id(p) in owned for p in root.parameters()):
                continue
            ran.told |= new
            ran.idle = _idle(root, owned)
            for training in sorted(new):
                self._context.log.event(
                    "mode", step=step, model=ran.number, name=type(root).__name__,
                    training=training, kinds=_kinds(root),
                )  # fmt: skip
            self._context.log.event(
                "settings", step=step, over=list(self._context.sets.averaged(root)),
                of={**ran.settings, **given},
                parts=[[n, _kinds(part)] for n, part in ran.parts if _is_trained(part, owned)],
            )  # fmt: skip

    def _write_drops(self, step: int, owned: Set[int]) -> None:
        """Of models that did not train since the check before; others are followed from now on."""
        while self._waiting:
            self._waiting.pop().remove()
        dropped, self._dropped = self._dropped, set()
        for root in self._context.recorder.models.owners():
            parameters, modules = (
                list(root.parameters()),
                list(islice(root.modules(), _MOST_MODULES)),
            )
            first = next((m for m in modules if isinstance(m, dropout._DropoutNd) and m.p), None)
            trains = any(p.grad is not None or id(p) in owned for p in parameters)
            if first is None or trains or any(map(_is_compiled, modules)):
                continue
            if id(root) in dropped:
                prints = Fingerprints()
                own = [local(p) for p in parameters if p.dim() > 1]
                for one in [p for p in own if 0 < p.numel() <= _SMALL][:_FEW]:
                    prints.add(one)
                self._context.log.event(
                    "drops", step=step, model=type(unwrapped(root)).__name__,
                    module=self._context.recorder.module_names.get(first) or "",
                    weights=prints.read(),
                )  # fmt: skip

            def ran(_recorder: Any, module: Any, _args: Any, key: int = id(root)) -> None:
                if module.training and not torch.is_grad_enabled() and _in_backward() == -1:
                    self._dropped.add(key)

            self._waiting.append(first.register_forward_pre_hook(Hook(ran)))

    def _counted(self) -> None:
        self._backwards += 1
        self._forget()
        graded = {**self._read, **self._graded}
        self._graded, self._read = {}, {}
        if graded:
            self._context.log.event(
                "no_grad", step=self._context.recorder.current_step,
                modules=[name for name, with_gradients in graded.items() if not with_gradients],
            )  # fmt: skip

    def _stepped(self, _optimizer: Any) -> None:
        self._backwards = 0


def _settings(root: Any) -> Dict[str, List[Any]]:
    """Plain attributes of the modules of a model, those of torch and numbers of others, and which
    parameters are frozen, each with how many have it and the first one's name."""
    found: Dict[str, List[Any]] = {}
    for name, module in islice(unwrapped(root).named_modules(), _MOST_MODULES):
        kind = type(module)
        plain = (
            (bool, int, float, str) if kind.__module__.startswith("torch.nn.modules.") else float
        )
        for key, value in vars(module).items():
            known = isinstance(value, plain) and not key.startswith("_")
            told = key != "training" or _depends_on_mode(module)
            if known and told and len(repr(value)) <= _SHORT:
                found.setdefault(f"{key} of {kind.__name__} = {value!r}", [0, name])[0] += 1
    for name, parameter in islice(root.named_parameters(), _MOST_MODULES):
        told = [f"requires_grad of parameters = {parameter.requires_grad}"]
        if parameter._backward_hooks:
            hooks = len(parameter._backward_hooks)
            told.append(f"number of gradient hooks of a parameter = {hooks}")
        for text in told:
            found.setdefault(text, [0, name])[0] += 1
    return found


def _idle(root: Any, owned: Set[int]) -> List[Tuple[Any, Any]]:
    """Some modules of which an optimizer trains parameters, none of which has a gradient, and what
    each is part of. None of a compiled model: a hook makes torch.compile trace a program again."""
    modules = list(islice(root.modules(), _MOST_MODULES))
    if any(map(_is_compiled, modules)):
        return []
    found = ((m, list(m.parameters(recurse=False))) for m in modules)
    of = {id(part): module for module in modules for part in module.children()}
    idle = ((m, of.get(id(m), m)) for m, own in found
            if any(id(p) in owned and p.requires_grad for p in own)
            and all(p.grad is None for p in own))  # fmt: skip
    return list(islice(idle, _MOST_IDLE))


def _is_compiled(module: Any) -> bool:
    return hasattr(module, "_orig_mod") or bool(getattr(module, "_compiled_call_impl", None))


def _in_evaluation(module: Any, prefix: str = "") -> Iterator[Tuple[str, Any]]:
    """The outermost parts of a module in training mode that are in evaluation mode and have parts
    of their own: a norm that is frozen alone is a known recipe."""
    for name, part in module.named_children() if module.training else ():
        if part.training:
            yield from _in_evaluation(part, f"{prefix}{name}.")
        elif next(part.children(), None) is not None and any(map(_depends_on_mode, part.modules())):
            yield prefix + name, part


def _kinds(module: Any) -> List[str]:
    """The classes of its modules that depend on the mode."""
    return sorted({type(one).__name__ for one in module.modules() if _depends_on_mode(one)})


def _is_trained(part: Any, owned: Set[int]) -> bool:
    """Whether an optimizer trains parameters of it that are no norm's."""
    return any(
        parameter.grad is not None and id(parameter) in owned
        for module in part.modules()
        if not _depends_on_mode(module)
        for parameter in module.parameters(recurse=False)
    )


def _depends_on_mode(module: torch.nn.Module) -> bool:
    """Whether the module computes something else in evaluation mode."""
    if isinstance(module, dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, batchnorm._BatchNorm) and module.track_running_stats


def _autocast() -> str:
    """The device and dtype of autocast, or ""."""
    for device in ("cuda", "cpu"):
        try:
            if torch.is_autocast_enabled(device):
                return f"{device}, {torch.get_autocast_dtype(device)}"
        except TypeError:  # torch before 2.4 takes no device
            if (torch.is_autocast_cpu_enabled if device == "cpu" else torch.is_autocast_enabled)():
                return device
    return ""
