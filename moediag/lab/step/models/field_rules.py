"""Sizes of a tiny model by the names of its configuration's fields, and adjustments of them."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Iterator, List, Tuple

from moediag.protocol import VOCAB, Size

LARGE = 128  # a field above it that no rule knows may be a size
TOP_K = r"experts_per_tok|(^|_)top_?k$|top_k_experts|^moe_k$|^num_selected_experts$"
# Field -> size; the first matching pattern applies. Fields without one keep their default.
_RULES: Tuple[Tuple[str, Callable[[Size], Any]], ...] = (
    (r"vocab_size", lambda s: VOCAB),
    (TOP_K, lambda s: s.top_k),
    (r"^(n_group|topk_group|num_expert_group|decoder_sparse_step|interleave_moe_layer_step)$",
     lambda s: 1),
    (r"^(hidden_size|d_model|n_embd|out_hidden_size|dim|model_dim|embedding_size)$",
     lambda s: s.hidden),
    (r"^(num_key_value_heads|kv_n_heads|num_kv_heads|num_query_groups|swa_num_key_value_heads)$",
     lambda s: s.kv_heads),
    (r"^mamba_(n|num)_heads$", lambda s: 2 * s.hidden // s.head_dim),
    (r"^(attn|expert)_layer_period$", lambda s: 2),
    (r"^attn_layer_offset$", lambda s: 0),
    (r"^expert_layer_offset$", lambda s: 1),
    (r"(^|_)(num_attention_heads|n_heads|num_heads|n_head)$|^(en|de)coder_attention_heads$",
     lambda s: s.heads),
    (r"^mamba_expand$|^expand$|^mamba_expand_factor$", lambda s: 2),
    (r"^linear_num_key_heads$", lambda s: s.kv_heads),
    (r"^(linear_num_value_heads|num_linear_heads|linear_num_heads)$", lambda s: s.heads),
    (r"^qk_head_dim$", lambda s: 2 * s.head_dim),
    (r"^indexer_kv_heads$", lambda s: 1),
    (r"_budget$", lambda s: 8),
    (r"_kpool$", lambda s: 1),
    (r"compress_ratio$", lambda s: 2),
    (r"head_dim(ension)?$|^kv_channels$|^attention_head_size$|_d_head$|^head_size$",
     lambda s: s.head_dim),
    (r"(^|_)(ssm_state_size|d_state|state_size)$", lambda s: 8),
    (r"(^|_)chunk_size$|^attention_chunk_size$", lambda s: 8),
    (r"^(n_groups|mamba_n_groups|mamba_num_groups)$", lambda s: 1),
    (r"intermediate_size|intermediate_dim|ffn_hidden|ffn_dim|_ffn_size|^shared_.*_size$",
     lambda s: s.width),
    (r"lora_rank$|_low_rank|^mamba_dt_rank$", lambda s: 16),
    (r"^(index|indexer)_.*topk$|^index_topk", lambda s: 4),
    (r"sliding_window(_size)?$|^window_size$|^local_attention_window$", lambda s: 8),
    (r"^(max_position_embeddings|max_seq_len|n_positions|seq_length|model_max_length)$",
     lambda s: 128),
    (r"hidden_size_per_layer", lambda s: 8),
    (r"hidden_size$|hidden_dim$|_(in|out|input|output)_dims?$", lambda s: s.hidden),
    (r"^(n|num|moe_num)_shared_experts$", lambda s: 1),
    (r"^(num_nextn_predict_layers|num_mtp_layers|num_kv_shared_layers)$", lambda s: 0),
    (r"^(first_k_dense_replace|moe_layer_start_index|num_dense_layers|n_dense_layers)$",
     lambda s: 1),
)  # fmt: skip


def counts_top_k(name: str) -> bool:
    """Whether a field of that name is the number of experts for each token."""
    return re.search(TOP_K, name) is not None


def size_of(name: str, size: Size) -> Any:
    """Returns the value of a field, None if no rule knows it."""
    return next((value(size) for pattern, value in _RULES if re.search(pattern, name)), None)


def sections(size: Size, share: float = 1.0) -> List[int]:
    """Returns sections (time, height, width) that fill half of the rotary dimension, which is this
    share of a head's."""
    half = int(size.head_dim * share) // 2
    return [half - 2 * (half // 3), half // 3, half // 3]


def rotary(value: Dict[str, Any], size: Size, sectioned: bool = False) -> Dict[str, Any]:
    """Returns rotary settings whose sections fit the tiny head. ``sectioned``: the family's have
    sections even if its default names none."""
    share = value.get("partial_rotary_factor") or 1.0
    found = {n: rotary(v, size) if isinstance(v, dict) else v for n, v in value.items()}
    if sectioned or "mrope_section" in value:
        found["mrope_section"] = sections(size, share)
    return found


# Adjustments for families whose fields depend on each other; the first that works is used.


def _as_is(fields: Dict[str, Any], size: Size) -> None:
    pass


def _equal_heads(fields: Dict[str, Any], size: Size) -> None:
    _set(fields, r"(^|_)(num_key_value_heads|kv_n_heads|num_kv_heads)$", size.heads)


def _no_dense_layers(fields: Dict[str, Any], size: Size) -> None:
    _set(fields, r"^(first_k_dense_replace|moe_layer_start_index|num_dense_layers)$", 0)


def _equal_heads_no_dense(fields: Dict[str, Any], size: Size) -> None:
    _equal_heads(fields, size)
    _no_dense_layers(fields, size)


def _one_expert(fields: Dict[str, Any], size: Size) -> None:
    _set(fields, TOP_K, 1)


def _all_small(fields: Dict[str, Any], size: Size) -> None:
    """Shrinks what no rule knows."""
    for part in _parts(fields):
        part.update({n: 16 for n, v in part.items() if type(v) is int and v > LARGE})


def _equal_heads_all_small(fields: Dict[str, Any], size: Size) -> None:
    _equal_heads(fields, size)
    _all_small(fields, size)


CHANGES = (
    _as_is, _equal_heads, _no_dense_layers, _equal_heads_no_dense, _one_expert, _all_small,
    _equal_heads_all_small,
)  # fmt: skip


def _set(fields: Dict[str, Any], pattern: str, value: int) -> None:
    for part in _parts(fields):
        part.update({n: value for n in part if re.search(pattern, n)})


def _parts(fields: Dict[str, Any]) -> Iterator[Dict[str, Any]]:
    yield fields
    for value in fields.values():
        if isinstance(value, dict):
            yield from _parts(value)
