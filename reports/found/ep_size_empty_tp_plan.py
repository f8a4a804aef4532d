"""DistributedConfig(tp_size=2, ep_size=2, tp_plan={}) is refused, although its docstring says that
an empty plan applies no rule of tensor parallelism.

Needs torch and transformers, no download, one process (torch's fake process group). Exit code 1 if
it shows, 0 if not.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    intermediate_size=16,
)  # fmt: skip
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
refused = {}
with tempfile.TemporaryDirectory() as folder:
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    for name, plan in {"no tp_plan": {}, "tp_plan={}": {"tp_plan": {}}}.items():
        asked = DistributedConfig(tp_size=2, ep_size=2, **plan)
        try:
            Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=asked)
            refused[name] = ""
        except ValueError as error:
            refused[name] = str(error)
        print(f"{name}: {refused[name] or 'loads'}")
assert not refused["no tp_plan"], "the control must load"
sys.exit(1 if refused["tp_plan={}"] else 0)
