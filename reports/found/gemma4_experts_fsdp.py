"""Gemma 4 with experts cannot be loaded with fsdp_size and ep_size together.

Needs torch and transformers, no download, one process (torch's fake process group). Exit code 1 if
it shows, 0 if not.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Gemma4ForCausalLM, Gemma4TextConfig
from transformers.distributed import DistributedConfig

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
config = Gemma4TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=24, moe_intermediate_size=24,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    global_head_dim=8, enable_moe_block=True, num_experts=4, top_k_experts=2,
    hidden_size_per_layer_input=0, num_kv_shared_layers=0, max_position_embeddings=128,
    pad_token_id=0, bos_token_id=None, eos_token_id=None,
    layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
raised = {}
with tempfile.TemporaryDirectory() as folder:
    Gemma4ForCausalLM(config).save_pretrained(folder)
    for sizes in ({"fsdp_size": 2}, {"fsdp_size": 2, "ep_size": 2}):
        name = ", ".join(f"{key}={value}" for key, value in sizes.items())
        try:
            Gemma4ForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
            raised[name] = ""
        except RuntimeError as error:
            raised[name] = str(error)
        print(f"{name}: {raised[name] or 'loaded'}")
assert not raised["fsdp_size=2"], "the control must load"
sys.exit(1 if raised["fsdp_size=2, ep_size=2"] else 0)
