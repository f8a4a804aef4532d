"""A forward of Inkling under its own tensor parallel plan raises.

Needs torch and transformers, no download, one process (torch's fake process group: what ranks
exchange is not computed, shapes are). Exit code 1 if it shows, 0 if not.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import InklingForCausalLM, InklingTextConfig
from transformers.distributed import DistributedConfig

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
config = InklingTextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=24, moe_intermediate_size=8,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, max_position_embeddings=128,
    pad_token_id=0, eos_token_id=None, layer_types=["hybrid", "hybrid"],
    mlp_layer_types=["dense", "sparse"],
)  # fmt: skip
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
tokens = torch.arange(2, 14)[None]
raised = {}
with tempfile.TemporaryDirectory() as folder:
    InklingForCausalLM(config).save_pretrained(folder)
    for name, sizes in {"one process": {}, "tp_size=2": {"tp_size": 2}}.items():
        asked = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
        model = InklingForCausalLM.from_pretrained(folder, attn_implementation="eager", **asked)
        try:
            model(tokens, use_cache=False)
            raised[name] = ""
        except (AssertionError, RuntimeError) as error:
            raised[name] = f"{type(error).__name__} {error}"
        print(f"{name}: {raised[name] or 'a forward runs'}")
assert not raised["one process"], "the control must run"
sys.exit(1 if raised["tp_size=2"] else 0)
