"""from_pretrained overwrites the last balancing bias of every Zaya router with -1.

Needs torch and transformers, no download, one process. Exit code 1 if it shows, 0 if not.
"""

import sys
import tempfile

import torch
import transformers
from transformers import ZayaConfig, ZayaForCausalLM

config = ZayaConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8, num_experts=4, num_experts_per_tok=1, max_position_embeddings=64,
    layer_types=["hybrid", "hybrid"],
    **{name: 24 for name in ("moe_intermediate_size", "intermediate_size", "ffn_hidden_size")
       if hasattr(ZayaConfig(), name)},
)  # fmt: skip
torch.manual_seed(0)
model = ZayaForCausalLM(config).eval()
biases = {n: b for n, b in model.named_buffers() if n.endswith("balancing_biases")}
for bias in biases.values():
    bias[-1] = 0.5  # training moves it, as it moves the others
    bias[0] = 0.25

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    loaded = ZayaForCausalLM.from_pretrained(folder).eval()

after = dict(loaded.named_buffers())
print(f"transformers {transformers.__version__}")
wrong = 0
for name, bias in biases.items():
    print(f"{name}: saved {bias.tolist()}, loaded {after[name].tolist()}")
    wrong += not torch.equal(bias, after[name])
tokens = torch.arange(2, 14)[None]
with torch.no_grad():
    gap = (model(tokens).logits - loaded(tokens).logits).abs().max()
print(f"{wrong} of {len(biases)} buffers differ; largest difference of a logit: {float(gap):.3g}")
sys.exit(1 if wrong else 0)
