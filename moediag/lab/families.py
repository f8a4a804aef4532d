"""The configuration fields of each MoE family of transformers.

Standard library only, like the protocol: ranks build models from it, and the control side writes
the same configuration into exported files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict

from moediag.protocol import ModelSpec


@dataclass(frozen=True)
class Family:
    """Where transformers has a family, and how its small configuration is written."""

    module: str  # package below transformers.models
    config: str  # configuration class
    model: str  # model class
    build: Callable[[ModelSpec], Dict[str, Any]]  # keyword arguments of the configuration class


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
    return dict(_mixtral(s), sliding_window=128)


def _llama4(s: ModelSpec) -> Dict[str, Any]:
    return dict(
        _mixtral(s),
        intermediate_size_mlp=s.intermediate * 2,
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
    """Returns the special tokens of multimodal models, moved into the last rows of the tiny
    vocabulary."""
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
    "mixtral": Family("mixtral", "MixtralConfig", "MixtralForCausalLM", _mixtral),
    "qwen2_moe": Family("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM", _qwen2_moe),
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
