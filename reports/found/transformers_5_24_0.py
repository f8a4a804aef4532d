"""Two families that transformers 5.24.0 adds cannot be loaded, or are saved wrongly, on two ranks.

Inkling 2's loop model with fsdp_size, and Sarvam's mixture of experts with fsdp_size and with
tp_size, raise while they load. The loop model with tp_size holds its packed experts in an order
that it does not declare. GLM-4's mixture of experts, whose class Sarvam has, is the control. With
fsdp_size only the loading is looked at: it permutes concatenated parameters of every family
(fsdp_size_concatenated.py). Needs torch and transformers, no download, one process (torch's fake
process group, once as each rank). Exit code 1 if it shows, 0 if not.
"""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

RANKS = 2
SIZES = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, moe_intermediate_size=8, n_routed_experts=4,
    num_experts_per_tok=2, max_position_embeddings=128, initializer_range=0.2, pad_token_id=0,
    eos_token_id=None,
)  # fmt: skip
LOOP = dict(
    num_hidden_layers=3, layer_types=["hybrid"] * 3, unpadded_vocab_size=60,
    n_layers_per_attn_res_block=1, loop_layer_index_start=1, loop_layer_index_end=2,
    loop_num_passes=2, loop_gate_rank=4,
)  # fmt: skip
GLM: dict[str, Any] = dict(intermediate_size=16, first_k_dense_replace=0)
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("inkling2_loop_text", LOOP, "fsdp_size"),
    ("inkling2_loop_text", LOOP, "tp_size"),
    ("sarvam_moe", GLM, "fsdp_size"),
    ("sarvam_moe", GLM, "tp_size"),
    ("glm4_moe", GLM, "fsdp_size"),
    ("glm4_moe", GLM, "tp_size"),
]


def together(parts: list[torch.Tensor], placement: Any) -> torch.Tensor:
    """What a gather of ``parts`` gives, by what the parameter declares."""
    if placement.is_replicate():
        return parts[0]
    if not placement.is_shard():  # packed: each part has its piece of both halves
        halves = zip(*(part.chunk(2, placement.dim) for part in parts), strict=True)
        parts = [piece for half in halves for piece in half]
    return torch.cat(parts, dim=placement.dim)


def problem(folder: str, name: str) -> str:
    """What is wrong with the model in ``folder``, loaded on two ranks; "" if nothing is."""
    whole = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    pieces = []
    for rank in range(RANKS):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        try:
            asked = DistributedConfig(**{name: RANKS})
            model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=asked)
            pieces.append(dict(model.named_parameters()))
        except RuntimeError as error:
            return f"rank {rank} raises {type(error).__name__}: {str(error)[:60]}…"
        finally:
            dist.destroy_process_group()
    for parameter, one in whole.items() if name == "tp_size" else ():
        if not hasattr(pieces[0][parameter], "placements"):
            continue
        (placement,) = pieces[0][parameter].placements
        parts = [each[parameter].to_local() for each in pieces]
        if not torch.equal(together(parts, placement), one):
            return f"{parameter}, {placement}, is gathered in another order"
    return ""


print(f"transformers {transformers.__version__}, torch {torch.__version__}")
shown = {}
for family, more, way in CASES:
    try:
        config = AutoConfig.for_model(family, **{**SIZES, **more})
    except ValueError:
        print(f"{family}: this release lacks it")
        continue
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        AutoModelForCausalLM.from_config(config).save_pretrained(place)
        shown[family, way] = problem(place, way)
    print(f"{family}, {way}={RANKS}: {shown[family, way] or 'right'}")
assert not shown["glm4_moe", "fsdp_size"], "the control"
assert not shown["glm4_moe", "tp_size"], "the control"
sys.exit(1 if any(shown.values()) else 0)
