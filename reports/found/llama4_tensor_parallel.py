"""A training forward of Llama 4 under its own tensor parallel plan raises.

Needs torch and transformers, no download, one process (torch's fake process group: what ranks
exchange is not computed, shapes are). Exit code 1 if it shows, 0 if not.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Llama4ForCausalLM, Llama4TextConfig
from transformers.distributed import DistributedConfig

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
config = Llama4TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=24, intermediate_size_mlp=24,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    num_local_experts=4, max_position_embeddings=128, pad_token_id=0, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
tokens = torch.arange(2, 14)[None]
raised = {}
with tempfile.TemporaryDirectory() as folder:
    Llama4ForCausalLM(config).save_pretrained(folder)
    whole = Llama4ForCausalLM.from_pretrained(folder, attn_implementation="eager")
    sharded = Llama4ForCausalLM.from_pretrained(
        folder, attn_implementation="eager", distributed_config=DistributedConfig(tp_size=2)
    )
for name, model, trains in (
    ("one process, with gradients", whole, True),
    ("tp_size=2, without gradients", sharded, False),
    ("tp_size=2, with gradients", sharded, True),
):
    try:
        with torch.set_grad_enabled(trains):
            model(tokens, use_cache=False)
        raised[name] = ""
    except RuntimeError as error:
        raised[name] = str(error).split(". ")[0]
    print(f"{name}: {raised[name] or 'a forward runs'}")
*controls, last = raised.values()
assert not any(controls), "the controls must run"
sys.exit(1 if last else 0)
