"""A tiny model of any family, built from its own configuration class by rules on field names."""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Set, Tuple

import torch
from torch import nn

from moediag.lab.step.models import field_rules, moe_configs, release_families
from moediag.lab.step.models.release_families import ReleaseFamily
from moediag.protocol import VOCAB, Size

LENGTH = 12  # tokens of the forward that decides whether a model works
SPREAD = 0.2  # standard deviation of the weights: errors show in the logits
OFFSET = 0.1  # what is added to every weight, so that no bias is 0 and no scale is 1
KINDS = 6  # kinds of layers that are built at most
LARGEST = 3_000_000  # parameters of a model that counts as tiny


class NotBuilt(Exception):
    """The rules do not build this family; the text says what each attempt raised."""


_LAYERS = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|num_decoder_layers)$")
_RANDOM = re.compile(r"drop(out)?|jitter|drop_path|layerdrop|pdrop")
_SPARSE = re.compile(r"^(is|use|enable)_moe(_block)?$")
_IN_LAYER = re.compile(r"\.\d+(\.|$)")
_TOKEN = re.compile(r"token_(id|index)$|_token_id$")


# ------------------------------------------------------------------------ models

_working: Dict[Tuple[str, Size], Any] = {}  # configurations that were tried


def configuration(family: ReleaseFamily, size: Size) -> Any:
    """Returns a copy of the first configuration whose model has a finite loss and gradient. Raises
    NotBuilt."""
    key = family.name, size
    if key not in _working:
        with torch.device("cpu"):  # also while a caller builds a model without weights
            _working[key] = _tried(family, size)
    return copy.deepcopy(_working[key])


def build(
    family: ReleaseFamily, size: Size, seed: int = 0, buffers: bool = False, **settings: Any
) -> nn.Module:
    """Returns the model in fp32, the same for the same arguments. ``settings``: for
    ``_from_config``, such as ``attn_implementation``. Raises NotBuilt and what the class raises."""
    model = _made(family, configuration(family, size), seed, settings)
    spread(model, seed, buffers)
    return model


def spread(model: nn.Module, seed: int, buffers: bool) -> None:
    """Adds noise to every weight, so that one that is lost, moved or never read shows.
    ``buffers``: also to saved buffers. Some are constants of the model, such as a causal decay:
    with noise its outputs mean nothing, but its bytes do."""
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    kept = model.state_dict() if buffers else dict(model.named_parameters())
    kept = {n: t.data for n, t in kept.items() if t.is_floating_point() and not t.is_meta}
    tensors = {t.data_ptr(): t for t in kept.values()}
    for tensor in tensors.values():  # tied weights once
        tensor.add_(OFFSET * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))


def _experts_of(config: Any) -> Set[int]:
    """Returns every number of routed experts in the configuration and its parts."""
    parts = [config, *(v for v in vars(config).values() if hasattr(v, "model_type"))]
    found = (getattr(p, name, None) for p in parts for name in moe_configs.experts_named(p))
    return {number for number in found if type(number) is int}


def _outline(family: ReleaseFamily, config: Any) -> nn.Module:
    """Returns the model without memory for its parameters."""
    with torch.device("meta"):
        model: nn.Module = release_families.model_class(family)._from_config(config)
    return model


def _has_experts(model: nn.Module) -> bool:
    """Whether a part of some layer has a number of experts, or modules of that name."""
    parts = (part for name, part in model.named_modules() if _IN_LAYER.search(name))
    return any(
        "experts" in part._modules or any(map(moe_configs.counts_experts, vars(part)))
        for part in parts
    )


def _made(family: ReleaseFamily, config: Any, seed: int, settings: Dict[str, Any]) -> nn.Module:
    torch.manual_seed(seed)
    made: nn.Module = release_families.model_class(family)._from_config(config, **settings)
    return made.float()


def _tried(family: ReleaseFamily, size: Size) -> Any:
    reasons: List[str] = []
    tokens = torch.randint(2, VOCAB - 8, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    for config in configurations(family, size):
        if isinstance(config, NotBuilt):
            reasons.append(str(config))
            continue
        kept = _experts_of(config) - {size.experts}
        if kept:
            reasons.append(f"no rule changes its number of experts ({max(kept)})")
            continue
        try:
            outline = _outline(family, copy.deepcopy(config))
            count = sum(parameter.numel() for parameter in outline.parameters())
            if count > LARGEST:
                reasons.append(f"a model of {count // 1_000_000} million parameters is not tiny")
                continue
            if _experts_of(config) and not _has_experts(outline):
                reasons.append("no layer of it has experts")
                continue
            model = _made(family, copy.deepcopy(config), 0, {})
            with torch.enable_grad():
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
        except Exception as error:
            reasons.append(_short(error))
            continue
        if math.isfinite(float(loss.detach())):
            return config
        reasons.append("its loss is not finite")
    raise NotBuilt("; ".join(dict.fromkeys(reasons)))


# ------------------------------------------------------------------------ configurations


def configurations(family: ReleaseFamily, size: Size) -> Iterator[Any]:
    """Yields tiny configurations in the order in which they are tried, and a NotBuilt for each that
    the class refuses."""
    for draft in _DRAFTS:
        for change in field_rules.CHANGES:
            try:
                fields = _fields(family, family.config, size, draft)
                change(fields, size)
                yield family.config(**fields)
            except Exception as error:
                yield NotBuilt(_short(error))


@dataclass(frozen=True)
class _Draft:
    """How the first version of the fields is made."""

    every_kind: bool = False  # layers of each kind that the source names, not only the default's
    fill: bool = False  # sizes also for fields that are None by default


_DRAFTS = (_Draft(every_kind=True), _Draft(), _Draft(every_kind=True, fill=True))


def _fields(family: ReleaseFamily, config: Any, size: Size, draft: _Draft) -> Dict[str, Any]:
    """Returns the keyword arguments of the tiny configuration."""
    default = config()
    known = parameters(config)
    # Attribute -> the parameter that sets it under another name.
    renamed = {own: n for n, own in (getattr(config, "attribute_map", None) or {}).items()}
    rows, layers = _layers(family, default, draft)
    fields: Dict[str, Any] = {}
    for own, value in vars(default).items():
        name = own if not known or own in known else renamed.get(own, own)
        if name.startswith("_") or (known and name not in known):
            continue
        if hasattr(value, "model_type"):
            fields[name] = _fields(family, type(value), size, draft)
        elif _LAYERS.match(name) and layers:
            fields[name] = layers
        elif own in rows:
            fields[name] = rows[own]
        elif _TOKEN.search(name):
            fields[name] = _token(name, value, known.get(name))
        elif name == "use_mamba_kernels":
            fields[name] = False  # they need a GPU
        elif value is False and _SPARSE.match(name):
            fields[name] = True
        elif value is False and name == "is_decoder" and config is family.config:
            fields[name] = True  # encoders by default, with a class that generates text
        elif name == "mlp_only_layers" and value:
            fields[name] = [0]
        elif isinstance(value, dict):
            if name.startswith("rope"):
                keys = getattr(default, "ignore_keys_at_rope_validation", None) or ()
                fields[name] = field_rules.rotary(value, size, "mrope_section" in keys)
        elif name == "mrope_section" and isinstance(value, list):
            fields[name] = field_rules.sections(size)
        else:
            fields.update(_number(name, value, size, draft))
    return fields


def _token(name: str, value: Any, declared: Any) -> Any:
    """Returns a special token that no test uses. ``declared``: the field or parameter."""
    if name.startswith("pad"):
        return 0
    if name.startswith(("bos", "eos")):
        return 1 if getattr(declared, "type", None) in (int, "int") else None
    return None if value is None else VOCAB - 1


def parameters(config: Any) -> Dict[str, Any]:
    """Returns the parameters of a configuration class; what it derives from them is not set."""
    known = dict(inspect.signature(config.__init__).parameters)
    known.update({f.name: f for f in getattr(config, "__dataclass_fields__", {}).values()})
    return known if len(known) > 3 else {}


def _number(name: str, value: Any, size: Size, draft: _Draft) -> Dict[str, Any]:
    """Returns the field with its size, {} to keep the default."""
    if type(value) is float:
        if name == "initializer_range":
            return {name: SPREAD}
        return {name: 0.0} if _RANDOM.search(name) else {}
    if type(value) is int or value is None:
        if moe_configs.counts_experts(name):
            return {name: size.experts}
        if value == 0 and name.endswith("head_dim"):
            return {}  # such heads have none, for example no rotary part
        wanted = field_rules.size_of(name, size)
        if type(value) is int and wanted is None and value > field_rules.LARGE:
            return {name: value}  # for _all_small
        needed = value is not None or draft.fill or field_rules.counts_top_k(name)
        if wanted is not None and needed:
            return {name: wanted}
    return {}


def _layers(family: ReleaseFamily, default: Any, draft: _Draft) -> Tuple[Dict[str, List[Any]], int]:
    """Returns the fields with one entry per layer, shortened to one layer of each kind, and the
    number of layers."""
    count = next((v for n, v in vars(default).items() if _LAYERS.match(n) and type(v) is int), 0)
    count = getattr(default, "num_hidden_layers", count) or count
    lists = {
        name: list(value)
        for name, value in vars(default).items()
        if isinstance(value, (list, tuple)) and len(value) == count and count > 1
        and all(isinstance(v, (str, int, bool, float, type(None))) for v in value)
    }  # fmt: skip
    words = {n: v for n, v in lists.items() if all(isinstance(x, (str, bool)) for x in v)} or lists
    rows = list(zip(*words.values()))  # noqa: B905 - Python 3.9
    places = [rows.index(row) for row in dict.fromkeys(rows)][:KINDS]
    shortened = {n: [v[i] for i in places] for n, v in lists.items()}
    if draft.every_kind and hasattr(default, "layer_types"):
        _add_kinds(family, shortened, draft)
    size = max((len(v) for v in shortened.values()), default=0)
    if size == 1:
        return {n: v * 2 for n, v in shortened.items()}, 2
    return shortened, size or (2 if count else 0)


def _add_kinds(family: ReleaseFamily, lists: Dict[str, List[Any]], draft: _Draft) -> None:
    """Adds a layer of each kind that the family's source names and the default lacks."""
    mapped = "layer_types" in lists
    if not mapped and (lists or not draft.fill):
        return  # the kinds have another name, or none is needed
    have = lists.setdefault("layer_types", [])
    if have and all(kind.startswith("hybrid") for kind in have):
        return  # each layer has every mixer; the single kinds are words for its parts
    for kind in _kinds(family):
        if kind not in have and len(have) < KINDS:
            for name, values in lists.items():
                values.append(kind if name == "layer_types" else values[0])


def _kinds(family: ReleaseFamily) -> List[str]:
    from transformers import configuration_utils

    allowed = getattr(configuration_utils, "ALLOWED_LAYER_TYPES", ())
    module = sys.modules[release_families.model_class(family).__module__]
    source = inspect.getsource(module)
    # Others are words for feed-forward layers, which have a field of their own.
    mixers = [kind for kind in allowed if kind.endswith("attention") or kind == "conv"]
    return [kind for kind in mixers if f'"{kind}"' in source]


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
