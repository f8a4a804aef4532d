"""Packed documents attend to each other in AFMoE and GPT-OSS (attention: sdpa and eager).

Needs torch and transformers, no download, one process. Exit code 1 if it shows, 0 if not.
"""

import sys

import torch
import transformers
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

SIZES = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8, intermediate_size=24, initializer_range=0.2, max_position_embeddings=64,
    pad_token_id=0,
)  # fmt: skip
FEW = dict(num_experts_per_tok=2, sliding_window=8)


def afmoe():
    return AfmoeForCausalLM, AfmoeConfig(
        **SIZES, **FEW, num_experts=4, moe_intermediate_size=24, num_dense_layers=1
    )


def gpt_oss():
    return GptOssForCausalLM, GptOssConfig(**SIZES, **FEW, num_local_experts=4)


def mixtral():  # the control
    return MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)


@torch.no_grad()
def leak(made, attention):
    """Returns how far other tokens in the first document move the logits of the second, as a share
    of the largest logit."""
    model_class, config = made()
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=attention).eval()
    first, other, second = (torch.randint(2, 60, (1, n)) for n in (7, 7, 9))
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]

    def of_second(before):
        packed = torch.cat([before, second], 1)
        return model(packed, position_ids=positions, use_cache=False).logits[:, 7:]

    one, two = of_second(first), of_second(other)
    return float((one - two).abs().max() / one.abs().max())


print(f"transformers {transformers.__version__}")
leaks = {}
for made in (afmoe, gpt_oss, mixtral):
    for attention in ("eager", "sdpa"):
        if attention == "sdpa" and made is gpt_oss:
            continue  # it has no sdpa
        leaks[made.__name__, attention] = share = leak(made, attention)
        print(f"{made.__name__} {attention}: document 1 moves document 2 by {share:.3g}")
assert leaks["mixtral", "eager"] < 1e-5, "the control must hold"
sys.exit(1 if leaks["afmoe", "eager"] > 1e-4 else 0)
