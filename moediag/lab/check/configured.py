"""The model of a config.json: its configuration and classes in the installed release."""

from __future__ import annotations

import contextlib
import copy
import importlib
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Tuple

import torch
from torch import nn

from moediag.lab.check import loaded_dtypes
from moediag.lab.step.models import (
    checkpoint,
    field_rules,
    moe_configs,
    release_families,
    tiny_family,
)
from moediag.lab.step.models.release_families import ReleaseFamily
from moediag.lab.step.models.tiny import Anatomy, MoeBlock
from moediag.recorder.not_applicable import NotApplicable


@dataclass(frozen=True)
class Configured:
    config: Any
    model: Any  # class
    family: Optional[ReleaseFamily]  # None: the release's automatic classes lack the model type
    experts: int  # routed ones of a block; 0: none
    top_k: int
    folder: Path = Path()  # of config.json
    beside: Tuple[str, ...] = ()  # parts of a composite that the model leaves out

    @property
    def text(self) -> Any:
        return moe_configs.text_of(self.config)

    def build(self, tied: bool, **settings: Any) -> nn.Module:
        """Returns the model. Not ``tied``: as from_pretrained builds it before it divides the
        parameters, with the releases' own context for that."""
        untied: Any = contextlib.nullcontext
        if not tied:
            with contextlib.suppress(ImportError):
                untied = importlib.import_module("transformers.initialization").no_tie_weights
        with untied():
            made: nn.Module = self.model._from_config(copy.deepcopy(self.config), **settings)
        return made.train()

    def dtype(self, asked: str) -> Tuple[torch.dtype, str]:
        """Returns the dtype that from_pretrained is given, and why that one."""
        if asked:
            return getattr(torch, asked), "as --dtype asks"
        name = checkpoint.dtype_argument()
        dtype = getattr(self.config, name, None) or getattr(self.text, name, None)
        if isinstance(dtype, torch.dtype):
            return dtype, "the configuration's"
        return torch.float32, "the configuration names none"

    def on_meta(self, dtype: torch.dtype, tied: bool = True) -> nn.Module:
        """Returns the model without weights, each parameter in the dtype in which from_pretrained
        leaves it."""
        with torch.device("meta"):
            model = self.build(tied, **{checkpoint.dtype_argument(): dtype})
        kept = loaded_dtypes.kept(model, dtype)
        for name, parameter in model.named_parameters():
            if kept is not None and kept.search(name):
                parameter.data = parameter.data.to(torch.float32)
        return model


def read(path: str) -> Configured:
    """Raises NotApplicable for a model that the release does not know, and what its configuration
    class raises."""
    from transformers import AutoConfig

    folder = Path(path).parent if Path(path).is_file() else Path(path)
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise NotApplicable(
                "the model's code is in its own folder, not in transformers"
            ) from error
        if "model type" in str(error) or "model_type" in str(error):
            raise NotApplicable(
                f"transformers {checkpoint.version()} has no such model: {_first(error)}"
            ) from error
        raise
    return of_config(config, folder)


def of_config(config: Any, folder: Path = Path()) -> Configured:
    family = release_families.find(config.model_type)
    text = moe_configs.text_of(config)
    experts, top_k = _experts(text)
    model = _model_class(config, family)
    if family is not None and release_families.built_from_a_part(family.name):
        family = release_families.find(text.model_type) or family
    beside: Tuple[str, ...] = ()
    if config is not text and getattr(model, "config_class", None) is type(text):
        # A composite whose automatic class is the text model.
        beside = tuple(
            name for name in getattr(config, "sub_configs", None) or ()
            if getattr(config, name, None) not in (None, text)
        )  # fmt: skip
        config = text
    return Configured(config, model, family, experts, top_k, folder, beside)


def _model_class(config: Any, family: Optional[ReleaseFamily]) -> Any:
    """Returns the class that the configuration names, else that of the automatic classes."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type):
            return found
    if family is None:
        raise NotApplicable(
            f"transformers {checkpoint.version()} has no model of type {config.model_type} that "
            "generates text"
        )
    return release_families.model_class(family)


def _experts(text: Any) -> Tuple[int, int]:
    """Returns the number of routed experts and of experts for each token. A field that the class
    does not know, as another release wrote it, counts only without one that it knows."""
    known = tiny_family.parameters(type(text))
    names = moe_configs.experts_named(text)
    names = [name for name in names if name in known] or names
    counts = [moe_configs.value(text, name) for name in names]
    counts = [count for count in counts if type(count) is int and count > 1]
    chosen = [v for n, v in vars(text).items() if field_rules.counts_top_k(n) and type(v) is int]
    return (max(counts), (chosen or [0])[0]) if counts else (0, 0)


def anatomy(model: Any, experts: int) -> Anatomy:
    """Returns the modules that the release says must not be split, which wrappers shard one by one,
    and the MoE blocks in them."""
    unsplit = set(getattr(model, "_no_split_modules", None) or ())
    # fully_shard gives a module a class of its own, derived from the model's.
    layers = tuple(
        (name, module) for name, module in model.named_modules()
        if any(class_.__name__ in unsplit for class_ in type(module).__mro__)
    )  # fmt: skip
    blocks = []
    for index, (layer_name, layer) in enumerate(layers):
        for name, module in layer.named_modules():
            held = getattr(module, "experts", None)
            if isinstance(held, nn.Module):
                fqn = f"{layer_name}.{name}" if name else layer_name
                blocks.append(MoeBlock(fqn, module, index, _listed(fqn, held, experts)))
    return Anatomy(layers, tuple(blocks), experts)


def _listed(fqn: str, held: nn.Module, experts: int) -> Tuple[Tuple[str, nn.Module], ...]:
    if not isinstance(held, nn.ModuleList) or len(held) != experts:
        return ()
    return tuple((f"{fqn}.experts.{i}", expert) for i, expert in enumerate(held))


def _first(error: BaseException) -> str:
    return textwrap.shorten(str(error), 160, placeholder=" …")
