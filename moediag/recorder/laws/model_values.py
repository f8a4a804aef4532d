"""Records, at checked steps, what no optimizer changes: buffers, parameters that no optimizer has,
frozen routers and models, and how often averages of a model were updated."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

import torch

from moediag.protocol.names import is_router, plain_name
from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.replica_sets import is_engine
from moediag.recorder.modules import unwrapped
from moediag.recorder.routing import expert_counts
from moediag.recorder.step.numbers import Fingerprints, capturing
from moediag.recorder.step.pieces import local

_WATCHER = "laws of model values"
_AVERAGES = "torch.optim.swa_utils"
_MOST_ELEMENTS = 1 << 22  # of a buffer, or of a frozen matrix
_MOST_NAMES = 200  # of parameters that no optimizer has
_SAMPLE = 1 << 16  # elements of a frozen parameter
_MOST_FROZEN = 16  # matrices of a model that does not train
_GROUPS = ("bit16_groups", "fp16_groups", "bf16_groups")  # of DeepSpeed's optimizers


class ModelValues:
    """Reads them once for each checked step, before the first optimizer's update; after it if its
    closure computes the gradients."""

    def __init__(self, context: LawContext, owned: Callable[[], List[Any]]) -> None:
        self._context = context
        self._owned = owned  # parameters of the optimizers that stepped
        self._averages: List[Any] = []  # weak references to averaged models
        self._late: List[int] = []  # the step that is read after its update

    def install(self) -> None:
        self._context.on_step.append(self._due)
        self._context.after_step.add(_WATCHER, self._updated, pending=self._late)
        self._context.replace_late(_AVERAGES, "AveragedModel", "__init__", self._averaging)

    def _averaging(self, init: Any) -> Any:
        known = self._averages

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            known.append(weakref.ref(self))

        return __init__

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
        prints = Fingerprints()
        models = [self._model(model, prints) for model in self._context.recorder.models.owners()]
        owned, names = self._owned(), self._context.names
        known, left = names.of(owned), self._left(owned)
        # Not where an optimizer has copies of the parameters, with gradients of their own, but for
        # DeepSpeed, which says which parameters they are.
        if any(n is None and p.grad is not None for n, p in zip(known, owned)):  # noqa: B905
            held = held_by_engines(self._context.recorder.models.owners())
            left = [p for p in left if held and id(p) not in held]
        found = {n: prints.add(local(p)) for n, p in zip(names.of(left), left) if n}  # noqa: B905
        hidden = [
            pair for model in self._context.recorder.models.owners() for pair in _hidden(model)
        ]
        ids = set(map(id, owned))
        found.update(
            (name, prints.add(local(p)))
            for name, p in hidden[:_MOST_NAMES]
            if p.grad is not None and id(p) not in ids
        )
        followers = [
            (type(unwrapped(model)).__name__, {n: prints.add(p) for n, p in self._idle(model, ids)})
            for model in self._context.recorder.models.owners()
        ]
        read = prints.read()
        for model in models:
            model["buffers"] = {name: read[at] for name, at in model["buffers"].items()}
        alive = [average for average in (one() for one in self._averages) if average is not None]
        self._context.log.event(
            "model", step=step, models=models,
            left_out={name: read[at] for name, at in found.items()},
            tensors=[name for name, p in hidden if not isinstance(p, torch.nn.Parameter)],
            replaced=list(found) if left and self._replaced(owned, known, left) else [],
            unowned=self._unowned(owned) if found else [],
            averages=[int(average.n_averaged) for average in alive],
            followers=[(k, {n: read[at] for n, at in of.items()}) for k, of in followers],
            tied=[names for model in self._context.recorder.models.owners()
                  for names in _tied(model)],
            idle=bool(owned) and not self._context.closure and all(p.grad is None for p in owned),
        )  # fmt: skip

    def _model(self, model: Any, prints: Fingerprints) -> Dict[str, Any]:
        over = self._context.sets.data_parallel(model)
        names = self._context.recorder.module_names
        buffers: Dict[str, int] = {}
        routers: List[str] = []
        for module in model.modules():
            prefix = names.get(module)
            if prefix is None:
                continue
            for name, buffer in module.named_buffers(prefix, recurse=False) if over else ():
                plain = type(buffer) is torch.Tensor and buffer.is_floating_point()
                if plain and 0 < buffer.numel() <= _MOST_ELEMENTS:
                    buffers[name] = prints.add(buffer)
            routers += _frozen_routers(module, prefix)
        frozen = [
            p for name, p in (model.named_parameters() if over else ())
            if not p.requires_grad and _is_replica(model, name, p)
        ]  # fmt: skip
        some = frozen[:: 1 + len(frozen) // _MOST_NAMES]
        for name, p in zip(self._context.names.of(some), some):  # noqa: B905
            if name is not None:
                buffers[name] = prints.add(p.detach().reshape(-1)[:_SAMPLE])
        return {"over": list(over), "buffers": buffers, "frozen_routers": routers}

    def _idle(self, model: Any, owned: Set[int]) -> List[Any]:
        """Some matrices, with names, of a model that does not train; [] of one that does."""
        if any(p.grad is not None or id(p) in owned for p in model.parameters()):
            return []
        plain = [p for p in model.parameters() if type(p.data) is torch.Tensor and p.dim() > 1]
        small = [p for p in plain if p.numel() <= _MOST_ELEMENTS]
        some = small[:: 1 + len(small) // _MOST_FROZEN]
        return [(n, p) for n, p in zip(self._context.names.of(some), some) if n]  # noqa: B905

    def _left(self, owned: List[Any]) -> List[Any]:
        """Parameters with a gradient that are not in ``owned``."""
        ids = set(map(id, owned))
        return [
            parameter
            for model in self._context.recorder.models.owners()
            for parameter in model.parameters()
            if parameter.grad is not None and id(parameter) not in ids and local(parameter).numel()
        ][:_MOST_NAMES]

    def _unowned(self, owned: List[Any]) -> List[str]:
        """Classes of the models in DistributedDataParallel of which no optimizer has a parameter,
        though they have gradients."""
        ids = set(map(id, owned))
        found = []
        for model in self._context.sets.wrapped():
            parameters = list(model.parameters())
            used = any(one.grad is not None for one in parameters)
            if used and ids.isdisjoint(map(id, parameters)):
                found.append(type(model).__name__)
        return found

    def _replaced(self, owned: List[Any], known: List[Optional[str]], left: List[Any]) -> bool:
        """Whether ``left`` replaced parameters: optimizers have as many of the same shapes that
        have no gradient and belong to no module."""
        orphans = [p for n, p in zip(known, owned) if n is None and p.grad is None]  # noqa: B905
        return sorted(tuple(p.shape) for p in orphans) == sorted(tuple(p.shape) for p in left)


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


def _hidden(model: Any) -> Iterator[Tuple[str, Any]]:
    """Parameters of modules that are in plain lists of a model's modules, and tensors that are
    trained like parameters and are none: ``parameters()`` does not see them."""
    known = set(map(id, model.parameters()))
    for prefix, module in unwrapped(model).named_modules():
        for key, value in vars(module).items():
            if _is_trained(value) and id(value) not in known:
                yield f"{prefix}.{key}".lstrip("."), value
            few = type(value) in (list, tuple) and len(value) <= _MOST_NAMES and key[0] != "_"
            for at, part in enumerate(value if few else ()):
                if isinstance(part, torch.nn.Module):
                    place = f"{prefix}.{key}[{at}]".lstrip(".")
                    for name, parameter in part.named_parameters():
                        if id(parameter) not in known:
                            yield f"{place}.{name}", parameter


def _is_trained(value: Any) -> bool:
    """Whether it is a tensor that no operation made, with gradients other than zero."""
    leaf = type(value) is torch.Tensor and value.is_leaf and value.requires_grad
    gradient = value.grad if leaf else None
    return gradient is not None and gradient.layout == torch.strided and bool(gradient.any())


def _tied(model: Any) -> List[List[str]]:
    """The names of each parameter that has several."""
    names: Dict[int, List[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = plain_name(name)
        own = names.setdefault(id(parameter), [])
        if plain not in own:
            own.append(plain)
    return [own for own in names.values() if len(own) > 1]


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
