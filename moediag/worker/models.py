"""Tiny real models of each MoE family, and where their experts are.

A model is the installed transformers release's own class, built from a small configuration:
nothing is downloaded. What a family calls its expert count differs between families and
releases; this table is the only place that knows.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import nn

from moediag.protocol import ModelSpec


class NotApplicable(Exception):
    """The installed release cannot do what the trial asks; the text is the reason."""


@dataclass(frozen=True)
class Family:
    """``build(spec)`` returns the keyword arguments of the configuration class. ``module`` is the
    package below ``transformers.models``."""

    module: str
    config: str
    model: str
    build: Callable[[ModelSpec], Dict[str, Any]]


@dataclass(frozen=True)
class MoeBlock:
    """One mixture-of-experts block. ``experts`` is empty where all experts of the block are one
    3-D parameter (fused), as in transformers >= 5.0 and in gpt_oss."""

    fqn: str
    module: nn.Module
    layer: int
    experts: Tuple[Tuple[str, nn.Module], ...]


@dataclass(frozen=True)
class Anatomy:
    """Decoder layers (FQN, module) of the text model in order, and the MoE blocks within."""

    layers: Tuple[Tuple[str, nn.Module], ...]
    blocks: Tuple[MoeBlock, ...]
    experts: int

    @property
    def fused(self) -> bool:
        return not any(block.experts for block in self.blocks)


def _common(s: ModelSpec) -> Dict[str, Any]:
    return dict(
        vocab_size=s.vocab,
        hidden_size=s.hidden,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def _qwen3_moe(s: ModelSpec) -> Dict[str, Any]:
    return dict(
        _common(s),
        head_dim=s.head_dim,
        intermediate_size=s.intermediate * 2,
        moe_intermediate_size=s.intermediate,
        num_experts=s.experts,
        num_experts_per_tok=s.top_k,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    )


def _qwen2_moe(s: ModelSpec) -> Dict[str, Any]:
    return dict(_qwen3_moe(s), shared_expert_intermediate_size=s.intermediate)


def _mixtral(s: ModelSpec) -> Dict[str, Any]:
    return dict(
        _common(s),
        head_dim=s.head_dim,
        intermediate_size=s.intermediate,
        num_local_experts=s.experts,
        num_experts_per_tok=s.top_k,
    )


def _olmoe(s: ModelSpec) -> Dict[str, Any]:
    return dict(
        _common(s),
        intermediate_size=s.intermediate,
        num_experts=s.experts,
        num_experts_per_tok=s.top_k,
    )


def _deepseek_v3(s: ModelSpec) -> Dict[str, Any]:
    return dict(
        _common(s),
        num_key_value_heads=s.heads,
        intermediate_size=s.intermediate * 2,
        moe_intermediate_size=s.intermediate,
        n_routed_experts=s.experts,
        num_local_experts=s.experts,
        n_shared_experts=1,
        num_experts_per_tok=s.top_k,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )


def _glm4_moe(s: ModelSpec) -> Dict[str, Any]:
    return dict(
        _common(s),
        head_dim=s.head_dim,
        intermediate_size=s.intermediate * 2,
        moe_intermediate_size=s.intermediate,
        n_routed_experts=s.experts,
        n_shared_experts=1,
        num_experts_per_tok=s.top_k,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
    )


def _gpt_oss(s: ModelSpec) -> Dict[str, Any]:
    return dict(
        _common(s),
        head_dim=s.head_dim,
        intermediate_size=s.intermediate,
        num_local_experts=s.experts,
        num_experts_per_tok=s.top_k,
        sliding_window=128,
    )


def _llama4(s: ModelSpec) -> Dict[str, Any]:
    return dict(
        _common(s),
        head_dim=s.head_dim,
        intermediate_size=s.intermediate,
        intermediate_size_mlp=s.intermediate * 2,
        num_local_experts=s.experts,
        num_experts_per_tok=s.top_k,
        interleave_moe_layer_step=1,
        attention_chunk_size=4096,
    )


def _rope_3d(s: ModelSpec) -> Dict[str, Any]:
    # Three sections (time, height, width) that fill half of the rotary dimension.
    half = s.head_dim // 2
    rope = {
        "rope_type": "default",
        "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        "rope_theta": 10000.0,
    }
    return {"rope_scaling": rope}


def _vision(s: ModelSpec, **more: Any) -> Dict[str, Any]:
    return dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=s.hidden, **more
    )


def _special(s: ModelSpec) -> Dict[str, Any]:
    """Special tokens of multimodal models, moved inside the tiny vocabulary's last rows."""
    names = (
        "image_token_id",
        "video_token_id",
        "audio_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "image_start_token_id",
        "image_end_token_id",
        "video_start_token_id",
        "video_end_token_id",
        "audio_start_token_id",
    )
    return {name: s.vocab - 1 - i for i, name in enumerate(names)}


def _glm4v_moe(s: ModelSpec) -> Dict[str, Any]:
    # GLM rotates half of the head: the sections fill a quarter of it.
    text = dict(_glm4_moe(s), **_rope_3d(s))
    text["rope_scaling"] = dict(
        text["rope_scaling"], partial_rotary_factor=0.5, mrope_section=[s.head_dim // 4, 0, 0]
    )
    vision = _vision(s, image_size=28, patch_size=14)
    return dict(text_config=text, vision_config=vision, tie_word_embeddings=False, **_special(s))


def _qwen3_vl_moe(s: ModelSpec) -> Dict[str, Any]:
    vision = _vision(s, patch_size=14, num_position_embeddings=16, deepstack_visual_indexes=[0])
    text = dict(_qwen3_moe(s), **_rope_3d(s))
    return dict(text_config=text, vision_config=vision, tie_word_embeddings=False, **_special(s))


def _qwen3_omni_moe(s: ModelSpec) -> Dict[str, Any]:
    audio = dict(
        d_model=16,
        encoder_layers=1,
        encoder_attention_heads=2,
        encoder_ffn_dim=16,
        num_mel_bins=8,
        downsample_hidden_size=8,
        output_dim=s.hidden,
    )
    return dict(_qwen3_vl_moe(s), audio_config=audio)


def _internvl(s: ModelSpec) -> Dict[str, Any]:
    vision = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=[28, 28],
        patch_size=[14, 14],
    )
    text = dict(_qwen3_moe(s), model_type="qwen3_moe")
    return dict(
        text_config=text,
        vision_config=vision,
        image_token_id=s.vocab - 1,
        tie_word_embeddings=False,
    )


FAMILIES: Dict[str, Family] = {
    "qwen3_moe": Family("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen2_moe": Family("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM", _qwen2_moe),
    "mixtral": Family("mixtral", "MixtralConfig", "MixtralForCausalLM", _mixtral),
    "olmoe": Family("olmoe", "OlmoeConfig", "OlmoeForCausalLM", _olmoe),
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", _deepseek_v3),
    "glm4_moe": Family("glm4_moe", "Glm4MoeConfig", "Glm4MoeForCausalLM", _glm4_moe),
    "glm4v_moe": Family(
        "glm4v_moe", "Glm4vMoeConfig", "Glm4vMoeForConditionalGeneration", _glm4v_moe
    ),
    "gpt_oss": Family("gpt_oss", "GptOssConfig", "GptOssForCausalLM", _gpt_oss),
    "llama4": Family("llama4", "Llama4TextConfig", "Llama4ForCausalLM", _llama4),
    "qwen3_vl_moe": Family(
        "qwen3_vl_moe", "Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration", _qwen3_vl_moe
    ),
    "qwen3_omni_moe": Family(
        "qwen3_omni_moe",
        "Qwen3OmniMoeThinkerConfig",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        _qwen3_omni_moe,
    ),
    "internvl": Family("internvl", "InternVLConfig", "InternVLForConditionalGeneration", _internvl),
}


def import_family(name: str) -> Tuple[type, type]:
    """(configuration class, model class). Raises NotApplicable where the release lacks it."""
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
    """The model in training mode on the CPU, initialised in fp32 from ``seed`` so that every rank
    and the reference start from the same weights, then cast to ``dtype`` (default: the spec's).
    ``experts``: the experts_implementation, where the release has the choice (None: its default).

    Raises NotApplicable.
    """
    config_class, model_class = import_family(spec.family)
    config = config_class(**dict(FAMILIES[spec.family].build(spec), **spec.config))
    for part in (config, getattr(config, "text_config", None)):
        if part is not None:
            part._attn_implementation = "eager"
            part.use_cache = False
            if experts is not None and hasattr(part, "_experts_implementation"):
                part._experts_implementation = experts
    torch.manual_seed(seed)
    model = model_class(config)
    if spec.dtype != "float32":
        model = model.to(getattr(torch, spec.dtype))
    if dtype is not None and dtype != spec.dtype:
        model = model.to(getattr(torch, dtype))  # the reference: rounded as the trial, in fp32
    return model.train()


def anatomy(model: nn.Module, spec: ModelSpec) -> Anatomy:
    """Finds decoder layers and MoE blocks by their shape, not by class names, so that it works
    for releases that did not exist when this was written."""
    layers: List[Tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not name.endswith("layers"):
            continue
        if len(module) == spec.layers and all(_has_experts(layer) for layer in module):
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
