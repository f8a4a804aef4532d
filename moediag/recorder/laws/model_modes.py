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

from itertools import islice
from typing import Any, Dict, Iterable, Iterator, List, Optional, Set, Tuple

import torch
from torch.nn.modules import batchnorm, dropout

from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.model_parts import ModelParts
from moediag.recorder.modules import Handles, Hook, unwrapped
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

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._models = ByObject()  # model -> _Ran
        self._seen = 0  # models so far; a freed one's number is not used again
        self._backwards = 0  # of the running step
        self._hooks = Handles()  # of parts of the model in this step
        # Idle module, whether it is the one that ran, or what it is part of -> whether that ran
        # with gradients. A module that only has its parameters never runs.
        self._graded: Dict[Tuple[str, bool], bool] = {}
        # Hooks on the first dropout of models that do not train, and the ids of those that ran.
        self._waiting = Handles()
        self._dropped: Set[int] = set()
        context.forward.add(WATCHER, self._called)
        context.after_backward.add(WATCHER, self._counted)
        context.after_step.add(WATCHER, self._stepped)
        context.recorder.on_uninstall += [self._hooks.remove_all, self._waiting.remove_all]
        context.on_check.append(self._write)

    def _called(self, root: Any, *_: Any) -> None:
        step = self._context.step
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
                parts = self._context.parts(root)
                ran.settings, ran.parts = _settings(parts), list(_in_evaluation(model))
                self._read_autocast(parts, ran.settings)
            self._follow(ran)
        ran.modes.add(training)
        if training != ran.now:
            ran.now = training
            ran.changes += 1
            if ran.changes <= MOST_CHANGES:
                self._context.event("mode_change", keep=True, model=ran.number, training=training)

    def _read_autocast(self, parts: ModelParts, settings: Dict[str, List[Any]]) -> None:
        """Where the program replaced the model's forward, as accelerate does to enter autocast in
        it, the state counts in which its first part with parameters runs."""
        inside = (
            m for _, m in parts.of_model[1:] if next(m.parameters(recurse=False), None) is not None
        )
        inner = next(inside, None) if "forward" in vars(parts.model) else None

        def read(*_: Any) -> None:
            if not any(what.startswith("autocast") for what in settings):
                settings[f"autocast = {_autocast() or 'off'}"] = [1, ""]

        self._hooks.remove_all()
        if inner is None or parts.compiled:
            read()
        else:
            self._hooks.append(inner.register_forward_pre_hook(Hook(read)))

    def _follow(self, ran: _Ran) -> None:
        """Notes until the backward whether idle modules run with gradients: an autograd.Function
        runs its forward without, and gives none to parameters that are not its arguments."""
        idle, ran.idle = ran.idle, []
        for module, whole in idle:
            name = self._context.name(module)
            for own, one in ((False, whole), (True, module)) if name else ():

                def read(*_: Any, key: Any = (name, own)) -> None:
                    # What a checkpoint runs again in the backward reads parameters with gradients.
                    if _in_backward() == -1 or not key[1]:
                        self._graded[key] = self._graded.get(key, False) or torch.is_grad_enabled()

                self._hooks.append(one.register_forward_pre_hook(Hook(read)))

    def _write(self, step: int) -> None:
        self._hooks.remove_all()  # of a part that did not run
        # An optimizer of inputs, as an attack's, trains no model.
        updated = self._context.updated
        owned = set(map(id, self._context.owned() if updated is None else updated))
        self._write_drops(step, owned)
        given, self._context.settings = self._context.settings, {}
        given[f"backwards of an update = {self._backwards}"] = 1, ""
        for root in self._models.owners():
            ran = self._models.get(root)
            new = ran.modes - ran.told if ran.step == self._context.step else ()
            parts = self._context.parts(root)
            if not new or not any(p.grad is not None and id(p) in owned for p in parts.parameters):
                continue
            ran.told |= new
            ran.idle = _idle(parts, owned)
            for training in sorted(new):
                self._context.log.event(
                    "mode", step=step, model=ran.number, name=type(root).__name__,
                    training=training, kinds=_kinds(parts.modules),
                )  # fmt: skip
            frozen = [[n, _kinds(p.modules())] for n, p in ran.parts if _is_trained(p, owned)]
            self._context.log.event(
                "settings", step=step, over=list(self._context.sets.averaged(root)),
                of={**ran.settings, **given}, parts=frozen,
            )  # fmt: skip

    def _write_drops(self, step: int, owned: Set[int]) -> None:
        """Of models that did not train since the check before; others are followed from now on."""
        self._waiting.remove_all()
        dropped, self._dropped = self._dropped, set()
        for parts in self._context.models():
            drops = (m for m in parts.modules if isinstance(m, dropout._DropoutNd) and m.p)
            first = next(drops, None)
            if first is None or parts.trains(owned) or parts.compiled:
                continue
            key = id(parts.root)
            if key in dropped:
                prints = Fingerprints()
                own = [local(p) for p in parts.parameters if p.dim() > 1]
                prints.add_all([p for p in own if 0 < p.numel() <= _SMALL][:_FEW])
                self._context.log.event(
                    "drops", step=step, model=type(parts.model).__name__,
                    module=self._context.name(first), weights=prints.read(),
                )  # fmt: skip

            def ran(_recorder: Any, module: Any, _args: Any, key: int = key) -> None:
                if module.training and not torch.is_grad_enabled() and _in_backward() == -1:
                    self._dropped.add(key)

            self._waiting.append(first.register_forward_pre_hook(Hook(ran)))

    def _counted(self) -> None:
        self._backwards += 1
        self._hooks.remove_all()
        graded = {name: one for (name, _), one in sorted(self._graded.items())}
        self._graded = {}
        if graded:
            self._context.event("no_grad", modules=[name for name, with_gradients in graded.items()
                                                    if not with_gradients])  # fmt: skip

    def _stepped(self, _optimizer: Any) -> None:
        self._backwards = 0


def _settings(parts: ModelParts) -> Dict[str, List[Any]]:
    """Plain attributes of the modules of a model, those of torch and numbers of others, and which
    parameters are frozen, each with how many have it and the first one's name."""
    found: Dict[str, List[Any]] = {}
    for name, module in parts.of_model[:_MOST_MODULES]:
        kind = type(module)
        plain = (
            (bool, int, float, str) if kind.__module__.startswith("torch.nn.modules.") else float
        )
        for key, value in vars(module).items():
            known = isinstance(value, plain) and not key.startswith("_")
            told = key != "training" or _depends_on_mode(module)
            if known and told and len(repr(value)) <= _SHORT:
                found.setdefault(f"{key} of {kind.__name__} = {value!r}", [0, name])[0] += 1
    for name, parameter in parts.named_parameters[:_MOST_MODULES]:
        told = [f"requires_grad of parameters = {parameter.requires_grad}"]
        if parameter._backward_hooks:
            hooks = len(parameter._backward_hooks)
            told.append(f"number of gradient hooks of a parameter = {hooks}")
        for text in told:
            found.setdefault(text, [0, name])[0] += 1
    return found


def _idle(parts: ModelParts, owned: Set[int]) -> List[Tuple[Any, Any]]:
    """Some modules of which an optimizer trains parameters, none of which has a gradient, and what
    each is part of. None of a compiled model: a hook makes torch.compile trace a program again."""
    if parts.compiled or all(p.grad is not None for p in parts.parameters):
        return []
    found = ((m, list(m.parameters(recurse=False))) for m in parts.modules)
    of = {id(part): module for module in parts.modules for part in module.children()}
    idle = ((m, of.get(id(m), m)) for m, own in found
            if any(id(p) in owned and p.requires_grad for p in own)
            and all(p.grad is None for p in own))  # fmt: skip
    return list(islice(idle, _MOST_IDLE))


def _in_evaluation(module: Any, prefix: str = "") -> Iterator[Tuple[str, Any]]:
    """The outermost parts of a module in training mode that are in evaluation mode and have parts
    of their own: a norm that is frozen alone is a known recipe."""
    for name, part in module.named_children() if module.training else ():
        if part.training:
            yield from _in_evaluation(part, f"{prefix}{name}.")
        elif next(part.children(), None) is not None and any(map(_depends_on_mode, part.modules())):
            yield prefix + name, part


def _kinds(modules: Iterable[Any]) -> List[str]:
    """The classes of those that depend on the mode."""
    return sorted({type(one).__name__ for one in modules if _depends_on_mode(one)})


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
