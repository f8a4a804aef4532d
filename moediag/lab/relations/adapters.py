"""PEFT's LoRA adapts what was asked, and says the same merged, unmerged and loaded again.

What is adapted is read from the weights: with random adapters, merging changes exactly those
weights that have one.
"""

from __future__ import annotations

import tempfile
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from moediag.lab.relations import numerical
from moediag.lab.relations.relation import Case, Relation, Tensors, alike, logits
from moediag.recorder.not_applicable import NotApplicable, NotInStack

RANK = 2
ALL_LINEAR = "all-linear"
ADAPTED = (ALL_LINEAR, "all-linear-experts", "named-modules", "named-parameters")
ROWS, LENGTH = 8, 16  # enough tokens for every expert
EXPERTS = "experts"  # the module of routed experts
REFUSED = ("out_proj",)  # PEFT refuses to adapt it in models with Mamba layers
LORA = ".lora_"  # in the names of adapters
BASE = ".base_layer"  # of the module that an adapter wraps
OF_MODEL = "base_model.model."


class Adapters(Relation):
    name = "lora"
    says = (
        "PEFT adapts what was asked, each adapter gets a gradient, and merged or loaded again it "
        "gives the same logits"
    )
    route = (
        "the modules that have adapters; the loss at changed adapters; the base model with the "
        "products of the adapters added to its weights"
    )

    def ways(self, case: Case) -> Sequence[str]:
        _peft()
        packed = _packed(case.model())
        return tuple(
            way
            for way in (*ADAPTED, "gradients", "merged", "loaded")
            if packed or way != "named-parameters"
        )

    def plain(self, case: Case, way: str) -> Tensors:
        if way in ADAPTED:
            return {name: torch.ones(()) for name in _asked(case.model(), way)}
        if way == "gradients":
            return _reached(case)
        with torch.no_grad():
            return {"logits": logits(_adapted(case), _tokens(case))}

    def other(self, case: Case, way: str) -> Tensors:
        if way in ADAPTED:
            return _changed(case, way)
        if way == "gradients":
            return _reached_by_adapters(case)
        model = _adapted(case)
        other = model.merge_and_unload() if way == "merged" else _loaded(case, model)
        with torch.no_grad():
            return {"logits": logits(other, _tokens(case))}

    @torch.no_grad()
    def second(self, case: Case, way: str, wrong: Sequence[str]) -> Optional[bool]:
        if way in ADAPTED:
            return _lacks_modules(case, way, wrong)
        if way == "gradients":
            return _unreached(case, wrong[0])
        model = _adapted(case)
        sides = [self.plain(case, way)["logits"], self.other(case, way)["logits"]]
        base = case.model()
        for name, parameter in base.named_parameters():
            delta = _products(model).get(name)
            if delta is not None:
                parameter.add_(delta)
        right = logits(base, _tokens(case))
        near = [alike(side, right, 1e-4) for side in sides]
        return near[0] != near[1]


def _peft() -> Any:
    """Returns the package. Raises NotInStack without it."""
    try:
        import peft
    except ImportError as error:
        raise NotInStack("peft") from error
    return peft


def _tokens(case: Case) -> torch.Tensor:
    return case.tokens(ROWS, LENGTH)


# ------------------------------------------------------------------------ what is asked


def _linear(model: Any) -> Dict[str, nn.Module]:
    """Returns the linear modules but the output's, as PEFT's documentation of all-linear does."""
    output = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    }


def _packed(model: nn.Module) -> List[str]:
    """Returns the parameters that hold the matrices of all experts of a layer."""
    return [n for n, p in model.named_parameters() if p.ndim == 3 and EXPERTS in n.split(".")]


def _of_experts(model: nn.Module) -> List[str]:
    """Returns the weights of routed experts: packed, or of each expert's linear modules."""
    linear = _linear(model)
    listed = [f"{name}.weight" for name in linear if EXPERTS in name.split(".")]
    return [*_packed(model), *listed]


def _asked(model: nn.Module, way: str) -> List[str]:
    """Returns the weights that this way asks PEFT to adapt. Raises NotApplicable if none."""
    if way == "named-parameters":
        return _packed(model)
    if way == "all-linear-experts":
        found = _of_experts(model)
        if not found:
            raise NotApplicable("the model has no matrices of routed experts")
        return found
    return [f"{name}.weight" for name in _linear(model)]


def _targets(model: nn.Module, way: str) -> Dict[str, Any]:
    """Returns the arguments of LoraConfig. Without a way: every matrix that can be adapted."""
    if way == "named-parameters":
        return {"target_modules": [], "target_parameters": _packed(model)}
    if way == "named-modules":
        return {"target_modules": sorted(_linear(model))}
    if way:
        return {"target_modules": ALL_LINEAR}
    # A class of its own may compute something else than a product, which all-linear shows.
    plain = [name for name, module in _linear(model).items() if type(module) is nn.Linear]
    named = {"target_modules": [n for n in plain if n.rpartition(".")[2] not in REFUSED]}
    return {**named, "target_parameters": _packed(model)} if _packed(model) else named


# ------------------------------------------------------------------------ models


def _adapted(case: Case, way: str = "", train: bool = False) -> Any:
    """Returns PEFT's model with random adapters. Raises what PEFT raises."""
    base = case.model(train=train)
    torch.manual_seed(case.seed + 3)
    config = _peft().LoraConfig(
        r=RANK, lora_alpha=2 * RANK, init_lora_weights=False, **_targets(base, way)
    )
    return _peft().get_peft_model(base, config).train(train)


def _loaded(case: Case, model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return _peft().PeftModel.from_pretrained(case.model(), folder).eval()


def _wrapped(model: nn.Module) -> Dict[str, str]:
    """Returns module with an adapter -> the name of the weight in the base model."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            inner = name.replace(BASE, "").replace(OF_MODEL, "", 1)
            found[name] = f"{inner}.{getattr(module, 'parameter_name', 'weight')}"
    return found


def _products(model: nn.Module) -> Tensors:
    """Returns what the adapters add to each weight."""
    wrapped = _wrapped(model)
    modules: Dict[str, Any] = dict(model.named_modules())
    return {weight: modules[name].get_delta_weight("default") for name, weight in wrapped.items()}


# ------------------------------------------------------------------------ measurements


@torch.no_grad()
def _changed(case: Case, way: str) -> Tensors:
    """Returns whether each weight that was asked for changes when the adapters are merged, and
    every other one that does, where only what was named may."""
    before = dict(case.model().named_parameters())
    adapted = _adapted(case, way)
    _loss(adapted, case)  # an adapter of a module that is no plain product raises
    after = dict(adapted.merge_and_unload().named_parameters())
    changed = {n for n, p in before.items() if n not in after or not torch.equal(p, after[n])}
    asked = _asked(case.model(), way)
    more = changed - {*asked} if way.startswith("named") else set()
    return {name: torch.tensor(float(name in changed)) for name in [*asked, *sorted(more)]}


def _lacks_modules(case: Case, way: str, wrong: Sequence[str]) -> bool:
    """Whether PEFT's model has no adapter for one of these weights, or one that was not asked."""
    has: Set[str] = {*_wrapped(_adapted(case, way)).values()}
    asked = {*_asked(case.model(), way)}
    return any((name in has) != (name in asked) for name in wrong)


def _loss(model: Any, case: Case) -> Any:
    tokens = _tokens(case)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _reached(case: Case) -> Tensors:
    """Returns whether a gradient reaches each weight that gets an adapter, in the base model."""
    model = case.model(train=True)
    _loss(model, case).backward()
    reached = {n: _any(p.grad) for n, p in model.named_parameters()}
    return {name: reached[name] for name in _wrapped(_adapted(case)).values()}


def _reached_by_adapters(case: Case) -> Tensors:
    """Returns whether both tensors of each adapter get a gradient."""
    model = _adapted(case, train=True)
    _loss(model, case).backward()
    return {
        weight: torch.stack([_any(p.grad) for _, p in _adapters_of(model, weight)]).min()
        for weight in _wrapped(model).values()
    }


def _any(gradient: Optional[torch.Tensor]) -> torch.Tensor:
    return torch.tensor(float(gradient is not None and bool(gradient.any())))


def _unreached(case: Case, weight: str) -> bool:
    """Whether the loss ignores a tensor of this weight's adapter, or depends on it smoothly though
    no gradient reaches it."""
    model = _adapted(case, train=True)
    with torch.enable_grad():
        _loss(model, case).backward()
    parameter = next(p for _, p in _adapters_of(model, weight) if not _any(p.grad))
    return numerical.smooth(parameter, lambda: _loss(model, case)) is not False


def _adapters_of(model: nn.Module, weight: str) -> List[Tuple[str, nn.Parameter]]:
    places = [name for name, adapted in _wrapped(model).items() if adapted == weight]
    return [(n, p) for n, p in model.named_parameters() if n.partition(LORA)[0] in places]
