"""Under Apertus' tensor parallel plan each rank has another gradient of the activations' weights.

Needs torch and transformers, no download; starts two processes (gloo). Exit code 1 if it shows, 0
if not.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.tensor import DTensor
from transformers import ApertusConfig, ApertusForCausalLM
from transformers.distributed import DistributedConfig

TOKENS = torch.arange(2, 26).view(2, 12)
CONFIG = ApertusConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16384,
    dtype=torch.float32,
)  # fmt: skip


def stepped(model):
    """Returns the loss, and the gradient of each parameter, whole."""
    loss = model(TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return float(loss.detach()), whole


def rank(number, folder, store, answer):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    one, right = stepped(ApertusForCausalLM.from_pretrained(folder, dtype=torch.float32))
    config = DistributedConfig(tp_size=2)
    sharded = ApertusForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=config
    )
    two, found = stepped(sharded)
    wrong = [n for n, g in found.items() if not torch.allclose(g, right[n], rtol=1e-3, atol=1e-6)]
    here = {name: float(found[name].sum()) for name in wrong}
    ranks = [None, None]
    dist.all_gather_object(ranks, here)
    if number == 0:
        print(f"loss: one process {one:.6f}, tp_size=2 {two:.6f}")
        for name in sorted({*ranks[0], *ranks[1]}):
            values = ", ".join(f"rank {r} {of.get(name, 0.0):.3e}" for r, of in enumerate(ranks))
            print(f"gradient of {name}: one process {float(right[name].sum()):.3e}, {values}")
        answer.put(len(wrong))
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"transformers {transformers.__version__}, torch {torch.__version__}", flush=True)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        ApertusForCausalLM(CONFIG).save_pretrained(folder)
        answer = mp.get_context("spawn").SimpleQueue()
        mp.spawn(rank, (folder, f"{folder}/store", answer), nprocs=2)
        wrong = answer.get()
    print(f"{wrong} gradients differ")
    sys.exit(1 if wrong else 0)
