"""Loading with fsdp_size gives a rank other rows of a parameter that is concatenated from several.

Needs torch and transformers, no download, one process (torch's fake process group). Exit code 1 if
it shows, 0 if not.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import BailingHybridConfig, BailingHybridForCausalLM
from transformers.distributed import DistributedConfig

RANKS = 2
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
config = BailingHybridConfig(
    vocab_size=64, hidden_size=32, intermediate_size=24, moe_intermediate_size=24,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16,
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, head_dim=8, num_expert_group=1,
    topk_group=1, num_experts=4, num_experts_per_token=2, first_k_dense_replace=1,
    num_nextn_predict_layers=0, linear_head_dim=8, linear_num_heads=4, pad_token_id=0,
    eos_token_id=None, initializer_range=0.2,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
    mlp_layer_types=["dense", "sparse", "sparse"],
)  # fmt: skip
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    BailingHybridForCausalLM(config).save_pretrained(folder)
    whole = dict(BailingHybridForCausalLM.from_pretrained(folder).named_parameters())
    asked = DistributedConfig(fsdp_size=RANKS)
    sharded = BailingHybridForCausalLM.from_pretrained(folder, distributed_config=asked)
wrong = []
for name, parameter in sharded.named_parameters():
    piece = parameter.to_local()
    first = whole[name].chunk(RANKS)[0]  # fully_shard divides the first dimension
    assert piece.shape == first.shape, name
    if torch.equal(piece, first):
        continue
    wrong.append(name)
    rows = [next(i for i, r in enumerate(whole[name]) if torch.equal(r, row)) for row in piece]
    print(f"rank 0 has rows {rows} of {name}")
print(f"{len(wrong)} of {len(whole)} parameters have other rows than the first ones")
assert len(wrong) < len(whole) / 2, "the control: parameters that are not concatenated"
sys.exit(1 if wrong else 0)
