"""A forward of Doge under its own tensor parallel plan raises.

Needs torch and transformers, no download, one process (torch's fake process group: what ranks
exchange is not computed, shapes are). Exit code 1 if it shows, 0 if not.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DogeConfig, DogeForCausalLM
from transformers.distributed import DistributedConfig

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
config = DogeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
)  # fmt: skip
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
tokens = torch.arange(2, 14)[None]
raised = {}
with tempfile.TemporaryDirectory() as folder:
    DogeForCausalLM(config).save_pretrained(folder)
    for name, sizes in {"one process": {}, "tp_size=2": {"tp_size": 2}}.items():
        asked = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
        model = DogeForCausalLM.from_pretrained(folder, attn_implementation="eager", **asked)
        try:
            model(tokens, use_cache=False)
            raised[name] = ""
        except RuntimeError as error:
            raised[name] = str(error)
        print(f"{name}: {raised[name] or 'a forward runs'}")
assert not raised["one process"], "the control must run"
sys.exit(1 if raised["tp_size=2"] else 0)
