"""Tiny real models of each MoE family, and the location of their experts.

A model is the installed transformers release's own class with a small configuration; nothing is
downloaded.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

import torch
from torch import nn

from moediag.lab.families import FAMILIES
from moediag.lab.step.models import release_families, tiny_family
from moediag.lab.step.models.release_families import ReleaseFamily
from moediag.protocol import ModelSpec, Size
from moediag.recorder.not_applicable import NotApplicable


@dataclass(frozen=True)
class MoeBlock:
    """One mixture-of-experts block. ``experts`` is empty if all experts of the block are one 3-D
    parameter (fused), as in transformers >= 5.0 and in gpt_oss."""

    fqn: str
    module: nn.Module
    layer: int
    experts: Tuple[Tuple[str, nn.Module], ...]


@dataclass(frozen=True)
class Anatomy:
    """Decoder layers (FQN, module) of the text model in order, and their MoE blocks."""

    layers: Tuple[Tuple[str, nn.Module], ...]
    blocks: Tuple[MoeBlock, ...]
    experts: int

    @property
    def fused(self) -> bool:
        return not any(block.experts for block in self.blocks)


def add_to_output(output: Any, value: Any) -> Any:
    """Adds to the output of a MoE block: hidden states, or (hidden states, router logits)."""
    if isinstance(output, tuple):
        first: Tuple[Any, ...] = (output[0] + value.to(output[0].dtype),)
        return first + tuple(output[1:])
    return output + value.to(output.dtype)


def import_family(spec: ModelSpec) -> Tuple[type, type]:
    """Returns (configuration class, model class). Raises NotApplicable if the release lacks it."""
    if spec.by_rules:
        found = _of_release(spec)
        return found.config, release_families.model_class(found)
    return import_recipe(spec.family)


def import_recipe(name: str) -> Tuple[type, type]:
    """Returns the classes of a family of :data:`moediag.lab.families.FAMILIES`. Raises
    NotApplicable if the release lacks it."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise NotApplicable("transformers is not installed in this stack") from error

    family = FAMILIES[name]
    package = f"transformers.models.{family.module}"
    try:
        configuration = importlib.import_module(f"{package}.configuration_{family.module}")
        modeling = importlib.import_module(f"{package}.modeling_{family.module}")
        return getattr(configuration, family.config), getattr(modeling, family.model)
    except (ModuleNotFoundError, AttributeError) as error:
        raise NotApplicable(
            f"transformers {transformers.__version__} has no {name} ({error})"
        ) from error


def build(
    spec: ModelSpec, seed: int, dtype: Optional[str] = None, experts: Optional[str] = None
) -> nn.Module:
    """Returns the model in training mode on the CPU. It is initialised in fp32 from ``seed``, so
    that every rank and the reference start from the same weights, then cast to ``dtype`` (default:
    the spec's). ``experts``: the experts_implementation, if the release has the choice (None: its
    default).

    Raises NotApplicable.
    """
    model_class = import_family(spec)[1]
    config = _configuration(spec)
    for part in (config, getattr(config, "text_config", None)):
        if part is not None:
            part._attn_implementation = "eager"
            part.use_cache = False
            if experts is not None and hasattr(part, "_experts_implementation"):
                part._experts_implementation = experts
    torch.manual_seed(seed)
    model = model_class(config)
    if spec.by_rules:
        tiny_family.spread(model.float(), seed, buffers=True)
    if spec.dtype != "float32":
        model = model.to(getattr(torch, spec.dtype))
    if dtype is not None and dtype != spec.dtype:
        model = model.to(getattr(torch, dtype))  # the reference: rounded as the trial, in fp32
    return model.train()


def _of_release(spec: ModelSpec) -> ReleaseFamily:
    found = release_families.find(spec.family)
    if found is None:
        raise NotApplicable(f"the release has no model type {spec.family}")
    return found


def _configuration(spec: ModelSpec) -> Any:
    """Raises NotApplicable, also if the configuration lacks a field of ``spec.config``."""
    if not spec.by_rules:
        config_class = import_family(spec)[0]
        return config_class(**dict(FAMILIES[spec.family].build(spec), **spec.config))
    size = Size(
        spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.experts, spec.top_k,
        spec.intermediate,
    )  # fmt: skip
    try:
        config = tiny_family.configuration(_of_release(spec), size)
    except tiny_family.NotBuilt as error:
        raise NotApplicable(f"no tiny model was built: {error}") from error
    text = config.get_text_config()
    for name, value in spec.config.items():
        if not hasattr(text, name):
            raise NotApplicable(f"the configuration of {spec.family} has no {name}")
        setattr(text, name, value)
    return config


def anatomy(model: nn.Module, spec: ModelSpec) -> Anatomy:
    """Finds decoder layers and MoE blocks by their structure, not by class names, so that it works
    for later releases."""
    layers: List[Tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not name.endswith("layers"):
            continue
        # By rules, a model has as many layers as it has kinds, some of them without experts.
        if spec.by_rules or (len(module) == spec.layers and all(map(_has_experts, module))):
            layers = [(f"{name}.{i}", layer) for i, layer in enumerate(module)]
            break
    if not layers:
        raise NotApplicable(f"no decoder layers with experts found in {type(model).__name__}")
    blocks = []
    for index, (layer_fqn, layer) in enumerate(layers):
        for name, module in layer.named_modules():
            experts = getattr(module, "experts", None)
            if not isinstance(experts, nn.Module):
                continue
            fqn = f"{layer_fqn}.{name}" if name else layer_fqn
            listed: Tuple[Tuple[str, nn.Module], ...] = ()
            # transformers 5.0 has classes that derive from ModuleList but hold one 3-D parameter.
            if isinstance(experts, nn.ModuleList) and len(experts) == spec.experts:
                listed = tuple((f"{fqn}.experts.{i}", e) for i, e in enumerate(experts))
            blocks.append(MoeBlock(fqn, module, index, listed))
    return Anatomy(tuple(layers), tuple(blocks), spec.experts)


def _has_experts(layer: nn.Module) -> bool:
    return any(isinstance(getattr(m, "experts", None), nn.Module) for m in layer.modules())
