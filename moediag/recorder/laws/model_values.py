"""Records, at checked steps, what no optimizer changes: buffers, parameters that no optimizer has,
frozen routers and models, and how often averages of a model were updated.

statistics  step values{name: [sketch, elements]}   of buffers that follow samples and take part in
            training: those of modules without parameters that return a tensor like their input, as
            normalizers do; what a codebook counts; biases by which a router chooses
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice
from typing import Any, Dict, Iterator, List, Set, Tuple

import torch

from moediag.protocol.names import is_router, plain_name
from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext, several_ranks
from moediag.recorder.laws.model_parts import ModelParts
from moediag.recorder.laws.replica_sets import is_engine
from moediag.recorder.modules import Hook
from moediag.recorder.routing import expert_counts
from moediag.recorder.step.numbers import Fingerprints, capturing
from moediag.recorder.step.pieces import local

WATCHER = "laws of model values"
_AVERAGES = "torch.optim.swa_utils"
_MOST_ELEMENTS = 1 << 22  # of a buffer, or of a frozen matrix
_MOST_NAMES = 200  # of parameters that no optimizer has
_SAMPLE = 1 << 16  # elements of a frozen parameter
_MOST_FROZEN = 16  # matrices of a model that does not train
_STATISTICS = re.compile(r"cluster_size|(expert|correction|router|routing|gate)_bias$")
_GROUPS = ("bit16_groups", "fp16_groups", "bf16_groups")  # of DeepSpeed's optimizers


class ModelValues:
    """Reads them once for each checked step, before the first optimizer's update; after it if its
    closure computes the gradients."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._averages = ByObject()  # averaged models
        self._late: List[int] = []  # the step that is read after its update
        self._owners = ByObject()  # module that registers a buffer -> its class and a number
        self._kinds: Counter[str] = Counter()  # such modules of each class
        self._changed = ByObject()  # those that were hooked -> elements of a sample that it changes
        registering = context.around(WATCHER, self._registers)
        context.recorder.patches.replace(torch.nn.Module, "register_buffer", registering)
        averaging = self._context.around(WATCHER, after=self._averaging)
        context.on_step.append(self._due)
        context.after_step.add(WATCHER, self._updated, pending=self._late)
        context.replace_late(_AVERAGES, "AveragedModel", "__init__", averaging)

    def _averaging(self, _frame: Any, _result: Any, average: Any, /, *_: Any, **__: Any) -> None:
        self._averages.set(average, True)

    def _registers(self, module: Any, _frame: Any) -> None:
        kind = type(module).__name__
        norm = type(module).__module__.startswith("torch.") or "batchnorm" in kind.lower()
        if not norm and self._owners.get(module) is None:
            self._kinds[kind] += 1
            self._owners.set(module, f"{kind} {self._kinds[kind]}")

    def _ran(self, _recorder: Any, module: Any, args: Any, result: Any) -> None:
        given: Any = args[0] if args else None
        both = isinstance(given, torch.Tensor) and isinstance(result, torch.Tensor)
        if both and given.shape == result.shape and result.dim() > 1 and len(result):
            floats = given.is_floating_point() and result.is_floating_point()
            self._changed.set(module, floats * result[0].numel())

    def _tell_statistics(self, step: int, models: List[ModelParts]) -> None:
        sent, prints = self._context.sets.sent_buffers(), Fingerprints()
        found: List[Tuple[str, int]] = []
        # Dynamo traces the hooks of modules that it compiles.
        compiled = {id(one) for model in models if model.compiled for one in model.modules}
        for module in self._owners.owners():
            new = self._changed.get(module) is None and id(module) not in compiled
            if new and next(module.parameters(), None) is None:
                self._changed.set(module, 0)
                handle = module.register_forward_hook(Hook(self._ran))
                self._context.recorder.on_uninstall.append(handle.remove)
            place = self._context.recorder.module_names.get(module)
            place = self._owners.get(module) if place is None else place
            named = any(map(_STATISTICS.search, module._buffers))
            most = _SAMPLE if named else self._changed.get(module) or 0
            for name, buffer in module._buffers.items() if id(module) not in sent else ():
                if type(buffer) is torch.Tensor and 0 < buffer.numel() <= most:
                    prints.add_sketch(len(found), buffer)
                    found.append((f"{place}.{name}".lstrip("."), buffer.numel()))
        read = prints.sketches()
        values = {name: [read[at], n] for at, (name, n) in enumerate(found) if at in read}
        if values:
            self._context.log.event("statistics", step=step, values=values)

    def _due(self, step: int) -> None:
        if self._context.closure:
            self._late.append(step)
        else:
            self._write(step)

    def _updated(self, _optimizer: Any) -> None:
        step = self._late.pop()
        if not capturing():
            with torch.no_grad():
                self._write(step)

    def _write(self, step: int) -> None:
        prints, owned, models = Fingerprints(), self._context.owned(), self._context.models()
        if several_ranks():
            self._tell_statistics(step, models)
        described = [self._model(model, prints) for model in models]
        ids = set(map(id, owned))
        known, left = self._context.names.of(owned), _left(models, ids)
        # Not where an optimizer has copies of the parameters, with gradients of their own, but for
        # DeepSpeed, which says which parameters they are. A single number is no copy.
        copies = (p for n, p in zip(known, owned) if n is None and p.numel() > 1)  # noqa: B905
        if any(p.grad is not None for p in copies):
            held = held_by_engines([model.root for model in models])
            left = [p for p in left if held and id(p) not in held]
        hidden = [pair for model in models for pair in _hidden(model)][:_MOST_NAMES]
        others = [(n, p) for n, p in hidden if p.grad is not None and id(p) not in ids]
        left_out = prints.by_name([*self._context.names.known(left), *others])
        followers = [
            (type(model.model).__name__, prints.by_name(self._idle(model, ids))) for model in models
        ]
        read = prints.read()
        for one in described:
            one["buffers"] = one["buffers"](read)
        found = left_out(read)
        self._context.log.event(
            "model", step=step, models=described, left_out=found,
            tensors=[name for name, p in hidden if not isinstance(p, torch.nn.Parameter)],
            replaced=list(found) if left and _replaced(models, owned, left) else [],
            unowned=self._unowned(ids) if found else [],
            averages=[int(average.n_averaged) for average in self._averages.owners()],
            followers=[(kind, of(read)) for kind, of in followers],
            tied=[names for model in models for names in _tied(model)],
            idle=bool(owned) and not self._context.closure and all(p.grad is None for p in owned),
        )  # fmt: skip

    def _model(self, model: ModelParts, prints: Fingerprints) -> Dict[str, Any]:
        over = self._context.sets.data_parallel(model.root)
        names = self._context.recorder.module_names
        buffers: List[Tuple[str, Any]] = []
        routers: List[str] = []
        for module in model.modules:
            prefix = names.get(module)
            if prefix is None:
                continue
            for name, buffer in module._buffers.items() if over else ():
                plain = type(buffer) is torch.Tensor and buffer.is_floating_point()
                if plain and 0 < buffer.numel() <= _MOST_ELEMENTS:
                    buffers.append((f"{prefix}.{name}".lstrip("."), buffer))
            routers += _frozen_routers(module, prefix)
        frozen = [
            p for name, p in (model.named_parameters if over else ())
            if not p.requires_grad and _is_replica(model.root, name, p)
        ]  # fmt: skip
        some = self._context.names.known(frozen[:: 1 + len(frozen) // _MOST_NAMES])
        buffers += [(name, p.detach().reshape(-1)[:_SAMPLE]) for name, p in some]
        shown = prints.by_name(buffers)
        return {"over": list(over), "buffers": shown, "frozen_routers": routers}

    def _idle(self, model: ModelParts, owned: Set[int]) -> List[Any]:
        """Some matrices, with names, of a model that does not train; [] of one that does."""
        if model.trains(owned):
            return []
        plain = [p for p in model.parameters if type(p.data) is torch.Tensor and p.dim() > 1]
        small = [p for p in plain if p.numel() <= _MOST_ELEMENTS]
        return self._context.names.known(small[:: 1 + len(small) // _MOST_FROZEN])

    def _unowned(self, owned: Set[int]) -> List[str]:
        """Classes of the models in DistributedDataParallel of which no optimizer has a parameter,
        though they have gradients."""
        models = map(self._context.parts, self._context.sets.wrapped())
        return [
            type(model.root).__name__
            for model in models
            if model.trains(()) and owned.isdisjoint(map(id, model.parameters))
        ]


def _replaced(models: List[ModelParts], owned: List[Any], left: List[Any]) -> bool:
    """Whether ``left`` replaced parameters: optimizers have as many of the same shapes that have no
    gradient and belong to no model that was seen, or to none any more."""
    of_models = {id(p) for model in models for p in model.parameters}
    orphans = [p for p in owned if p.grad is None and id(p) not in of_models]
    return sorted(tuple(p.shape) for p in orphans) == sorted(tuple(p.shape) for p in left)


def _left(models: List[ModelParts], owned: Set[int]) -> List[Any]:
    """Parameters with a gradient that are not in ``owned``."""
    every = (p for model in models for p in model.parameters)
    left = (p for p in every if p.grad is not None and id(p) not in owned and local(p).numel())
    return list(islice(left, _MOST_NAMES))


def held_by_engines(models: List[Any]) -> Set[int]:
    """The ids of the parameters of which DeepSpeed's optimizers have copies."""
    optimizers = [getattr(root, "optimizer", None) for root in models if is_engine(root)]
    groups = (getattr(of, name, ()) for of in optimizers for name in _GROUPS)
    return {id(p) for of in groups for group in of for p in group}


def _is_replica(root: Any, name: str, parameter: Any) -> bool:
    """Whether DistributedDataParallel or DeepSpeed keeps the same parameter on all ranks."""
    kept = type(parameter.data) is torch.Tensor and parameter.is_contiguous()
    sharded = hasattr(parameter, "ds_tensor") or not getattr(parameter, "allreduce", True)
    ignored = name.partition(".")[2] in getattr(root, "parameters_to_ignore", ())
    wrapper = type(root).__name__ == "DistributedDataParallel" or is_engine(root)
    return wrapper and kept and not (sharded or ignored or "expert" in name.lower())


def _hidden(model: ModelParts) -> Iterator[Tuple[str, Any]]:
    """Parameters of modules that are in plain lists of a model's modules, and tensors that are
    trained like parameters and are none: ``parameters()`` does not see them."""
    for prefix, module in model.of_model:
        for key, value in vars(module).items():
            if _is_trained(value) and id(value) not in model.names:
                yield f"{prefix}.{key}".lstrip("."), value
            few = type(value) in (list, tuple) and len(value) <= _MOST_NAMES and key[0] != "_"
            for at, part in enumerate(value if few else ()):
                if isinstance(part, torch.nn.Module):
                    place = f"{prefix}.{key}[{at}]".lstrip(".")
                    for name, parameter in part.named_parameters():
                        if id(parameter) not in model.names:
                            yield f"{place}.{name}", parameter


def _is_trained(value: Any) -> bool:
    """Whether it is a tensor that no operation made, with gradients other than zero."""
    leaf = type(value) is torch.Tensor and value.is_leaf and value.requires_grad
    gradient = value.grad if leaf else None
    return gradient is not None and gradient.layout == torch.strided and bool(gradient.any())


def _tied(model: ModelParts) -> List[List[str]]:
    """The names of each parameter that has several."""
    several = (names for names in model.names.values() if len(names) > 1)
    plain = (list(dict.fromkeys(map(plain_name, names))) for names in several)
    return [names for names in plain if len(names) > 1]


def _frozen_routers(module: Any, prefix: str) -> List[str]:
    """Parameters of a block's router that do not require gradients although its experts do."""
    counts = expert_counts(module)
    if not counts:
        return []
    routers: Dict[str, bool] = {}
    experts = False
    for name, parameter in module.named_parameters(prefix):
        short = name[len(prefix) :].lower()
        if "expert" in short:
            experts = experts or parameter.requires_grad
        elif is_router(short) and parameter.ndim == 2:
            routers[name] = parameter.requires_grad or parameter.shape[0] not in counts
    return [name for name, trains in routers.items() if experts and not trains]
