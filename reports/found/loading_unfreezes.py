"""from_pretrained makes parameters trainable that their class freezes.

Needs torch and transformers, no download, one process. Exit code 1 if it shows, 0 if not.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    ViTMAEConfig,
    ViTMAEForPreTraining,
)

torch.manual_seed(0)
ernie = Ernie4_5_MoeForCausalLM(
    Ernie4_5_MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        moe_num_experts=2, moe_k=2, moe_layer_start_index=0,
    )
)  # fmt: skip
vit = ViTMAEForPreTraining(
    ViTMAEConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
        decoder_intermediate_size=32, image_size=16, patch_size=4,
    )
)  # fmt: skip


def reloaded(model):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder)


def unfrozen(model, loaded):
    after = dict(loaded.named_parameters())
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    return [name for name in frozen if after[name].requires_grad]


def two_steps(model):
    """Returns how two steps of one DDP rank end."""
    ranked = DistributedDataParallel(model)
    tokens = torch.arange(16)[None]
    for step in range(2):
        try:
            ranked(input_ids=tokens, labels=tokens).loss.backward()
        except RuntimeError as error:
            return f"step {step + 1}: {str(error).split('.')[0]}"
    return "both steps ran"


def moved(model):
    """Returns the largest change of the fixed position embeddings in one step of SGD."""
    embeddings = model.vit.embeddings.position_embeddings
    before = embeddings.detach().clone()
    model(pixel_values=torch.ones(1, 3, 16, 16)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.001).step()
    return float((embeddings.detach() - before).abs().max())


print(f"transformers {transformers.__version__}")
wrong = 0
for model in (ernie, vit):
    names = unfrozen(model, reloaded(model))
    wrong += len(names)
    print(f"{type(model).__name__}: loading made {len(names)} frozen parameters trainable", *names)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(f"DDP, new: {two_steps(ernie)}")
print(f"DDP, loaded: {two_steps(reloaded(ernie))}")
dist.destroy_process_group()
print(f"position embeddings of ViTMAE, loaded, moved by {moved(reloaded(vit)):.3g}")
sys.exit(1 if wrong else 0)
