"""Every configuration class of the installed transformers release with experts, and a tiny model of
it. Classes are found by their fields, not from a list, so that later releases work."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, List, Optional

import torch
from torch import nn

from moediag.families import FAMILIES
from moediag.protocol import ModelSpec

EXPERTS = 4  # of a tiny model
# Enables the auxiliary loss in every family that has one.
_LOSS = "load_balancing_loss_func("
_NAMES_EXPERTS = re.compile(r"^(num|n|moe_num)_.*experts$")
_OTHER_EXPERTS = re.compile(r"shared|per_tok|zero|group|null")
_GENERATES = re.compile(r"ForCausalLM$|ForConditionalGeneration$")
# Field -> size of the tiny model; the first matching pattern applies. Others keep their default.
_SIZES = (
    (r"experts_per_tok|(^|_)top_?k$|top_k_experts|^moe_k$", 2),
    (r"^vocab_size$", 64),
    (r"^(hidden_size|d_model|n_embd|out_hidden_size)$", 32),
    (r"^(num_hidden_layers|n_layers|num_layers|depth|(encoder|decoder)_layers)$", 2),
    (r"^(num_attention_heads|n_heads|num_heads|encoder_attention_heads)$", 4),
    (r"^(num_key_value_heads|kv_n_heads)$", 2),
    (r"head_dim$", 8),
    (r"^kv_channels$", 8),
    (r"intermediate_size|intermediate_dim|ffn_hidden_size|ffn_dim", 32),
    (r"lora_rank$", 16),
    (r"token_id$", 1),
    (r"^(max_position_embeddings|max_seq_len)$", 128),
    (r"^(n_group|topk_group|decoder_sparse_step|expert_layer_period|attn_layer_period)$", 1),
    (r"^(first_k_dense_replace|expert_layer_offset|attn_layer_offset)$", 0),
)  # fmt: skip
# For lists with one word per layer: the tiny model's layer types, if there is a choice.
_WANTED = ("sparse", "moe", "full_attention", "attention")


@dataclass(frozen=True)
class Found:
    """``model``: the text generation class of this configuration, None without one. ``has_loss``:
    its module calls an auxiliary loss."""

    config: Any
    model: Optional[Any]
    has_loss: bool

    @property
    def name(self) -> str:
        text: str = self.config.__name__
        return text


def experts_named(config: Any) -> List[str]:
    """Returns the fields of ``config``, aliases included, with the number of routed experts."""
    names = {*vars(config), *(getattr(config, "attribute_map", None) or {})}
    return sorted(n for n in names if counts_experts(n))


def text_of(config: Any) -> Any:
    """Returns the text model's part, or the configuration itself if it has no parts."""
    return config.get_text_config()


def find(with_loss: bool = False) -> Iterator[Found]:
    """Yields all of the release, by module and name, or only those whose module has an auxiliary
    loss. Skips classes that need arguments."""
    import transformers.models

    folder = Path(str(transformers.models.__file__)).parent
    for module in sorted(entry.name for entry in pkgutil.iter_modules([str(folder)])):
        source = folder / module / f"modeling_{module}.py"
        if not source.exists():
            continue
        text = source.read_text(encoding="utf-8")
        if (_LOSS if with_loss else "expert") in text:
            yield from _of_module(module, _LOSS in text)


def _of_module(module: str, has_loss: bool) -> Iterator[Found]:
    package = f"transformers.models.{module}"
    configurations = importlib.import_module(f"{package}.configuration_{module}")
    models = importlib.import_module(f"{package}.modeling_{module}")
    for _, config in inspect.getmembers(configurations, inspect.isclass):
        if config.__module__ != configurations.__name__ or not hasattr(config, "model_type"):
            continue
        made = _made(config)
        if made is not None and any(
            experts_named(part) for part in (made, text_of(made), *_parts(made))
        ):
            yield Found(config, _model_of(models, config), has_loss)


def _made(config: Any) -> Any:
    """Returns the instance; None for composite ones that need their parts."""
    try:
        return config()
    except Exception:
        return None


def _parts(config: Any) -> List[Any]:
    return [value for value in vars(config).values() if hasattr(value, "model_type")]


def _model_of(module: Any, config: Any) -> Optional[Any]:
    """Returns the module's class with this configuration; text generation before other heads."""
    fitting = [
        model
        for name, model in inspect.getmembers(module, inspect.isclass)
        if model.__module__ == module.__name__
        and getattr(model, "config_class", None) is config
        and _GENERATES.search(name)
    ]
    return fitting[0] if fitting else None


def tiny(found: Found) -> Any:
    """Returns a configuration small enough to train in a moment, with full auxiliary losses."""
    known = next((f for f in FAMILIES.values() if f.config == found.name), None)
    if known is not None:
        config = found.config(**known.build(ModelSpec(experts=EXPERTS, vocab=64)))
    else:
        config = found.config()
        _shrink(config)
    for part in (config, text_of(config)):
        part.use_cache = False
        for name in [n for n in vars(part) if n.endswith("aux_loss_coef")]:
            setattr(part, name, 1.0)
    return config


def build(found: Found, seed: int = 0) -> nn.Module:
    """Returns the model in training mode. Raises what the class raises."""
    torch.manual_seed(seed)
    assert found.model is not None
    model: nn.Module = found.model(tiny(found))
    return model.train()


def counts_experts(name: str) -> bool:
    return bool(_NAMES_EXPERTS.match(name)) and not _OTHER_EXPERTS.search(name)


def _shrink(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if hasattr(value, "model_type"):
            _shrink(value)
        elif isinstance(value, list) and value and all(isinstance(v, str) for v in value):
            kind = next((w for w in _WANTED if w in value), value[0])
            setattr(config, name, [kind, kind] if len(value) > 2 else value)
        elif type(value) is int:
            size = EXPERTS if counts_experts(name) else _size(name)
            if size is not None:
                setattr(config, name, size)


def _size(name: str) -> Optional[int]:
    return next((size for pattern, size in _SIZES if re.search(pattern, name)), None)
