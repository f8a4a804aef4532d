"""Inkling 2 loaded with tp_size holds its packed experts in an order that it does not declare.

Training is right, because each rank has its half of both matrices. What is gathered or saved has
them mixed. Needs torch and transformers, no download, one process (torch's fake process group, once
as each rank). Exit code 1 if it shows, 0 if not.
"""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Inkling2ForCausalLM, Inkling2TextConfig
from transformers.distributed import DistributedConfig

RANKS = 2


def together(parts: list[torch.Tensor], placement: Any) -> torch.Tensor:
    """What a gather of ``parts`` gives, by what the parameter declares."""
    if placement.is_replicate():
        return parts[0]
    if not placement.is_shard():  # packed: each part has its piece of both halves
        halves = zip(*(part.chunk(2, placement.dim) for part in parts), strict=True)
        parts = [piece for half in halves for piece in half]
    return torch.cat(parts, dim=placement.dim)


config = Inkling2TextConfig(
    vocab_size=64, hidden_size=32, moe_intermediate_size=8, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, n_routed_experts=4,
    num_experts_per_tok=2, max_position_embeddings=128, pad_token_id=0, initializer_range=0.2,
    eos_token_id=None, layer_types=["hybrid", "hybrid"],
)  # fmt: skip
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
pieces = []
with tempfile.TemporaryDirectory() as folder:
    Inkling2ForCausalLM(config).save_pretrained(folder)
    whole = dict(Inkling2ForCausalLM.from_pretrained(folder).named_parameters())
    for rank in range(RANKS):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        asked = DistributedConfig(tp_size=RANKS)
        model = Inkling2ForCausalLM.from_pretrained(folder, distributed_config=asked)
        pieces.append(dict(model.named_parameters()))
        dist.destroy_process_group()
wrong = []
for name, one in whole.items():
    if not hasattr(pieces[0][name], "placements"):
        continue
    (placement,) = pieces[0][name].placements
    gathered = together([each[name].to_local() for each in pieces], placement)
    if torch.equal(gathered, one):
        continue
    wrong.append(name)
    rows = [next(i for i, r in enumerate(one[0]) if torch.equal(r, row)) for row in gathered[0]]
    print(f"{name}, {placement}: gathered, expert 0 has rows {rows}")
print(f"{len(wrong)} of {len(whole)} parameters are gathered in another order")
assert len(wrong) < len(whole) / 2, "the control: all other parameters"
sys.exit(1 if wrong else 0)
