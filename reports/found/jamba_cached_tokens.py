"""Jamba forgets its recurrent state when several tokens follow a cache.

Needs torch and transformers, no download, one process. Exit code 1 if it shows, 0 if not.
"""

import sys

import torch
import transformers
from transformers import JambaConfig, JambaForCausalLM

config = JambaConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24, num_experts=4, num_experts_per_tok=2, mamba_d_state=8, mamba_dt_rank=16,
    attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=0,
    initializer_range=0.2, use_mamba_kernels=False, pad_token_id=0,
)  # fmt: skip
torch.manual_seed(0)
model = JambaForCausalLM(config).eval()
tokens = torch.randint(2, 60, (1, 12))


@torch.no_grad()
def steps(*lengths):
    """Returns the logits of all tokens, in forwards of these lengths that share a cache."""
    parts, cache, start = [], None, 0
    for length in lengths:
        found = model(tokens[:, start : start + length], past_key_values=cache, use_cache=True)
        parts.append(found.logits)
        cache, start = found.past_key_values, start + length
    return torch.cat(parts, 1)


whole = steps(12)
scale = float(whole.abs().max())
print(f"transformers {transformers.__version__}")
gaps = {}
for lengths in ((7, 1, 1, 1, 1, 1), (7, 5)):
    gaps[lengths] = float((steps(*lengths) - whole).abs().max()) / scale
    print(f"forwards of {lengths} tokens: logits differ by {gaps[lengths]:.3g} of the largest")
assert gaps[7, 1, 1, 1, 1, 1] < 1e-3, "the control must hold: one token at a time"
sys.exit(1 if gaps[7, 5] > 1e-3 else 0)
