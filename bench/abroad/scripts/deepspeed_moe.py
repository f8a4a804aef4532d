"""A small mixture of experts under DeepSpeed's ZeRO; FAULT chooses a fault, --stage the stage."""

import argparse
import os
import sys

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = os.environ.get("FAULT", "")
ap = argparse.ArgumentParser()
ap.add_argument("--stage", type=int, default=3)
ap.add_argument("--bf16", action="store_true")
ap.add_argument("--local_rank", type=int, default=0)
A = ap.parse_args()
V, D, E = 64, 32, 4


class Texts(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        t = torch.randint(0, V, (17,), generator=g)
        return t[:-1], t[1:]


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)) for _ in range(E)
        )

    def forward(self, x):
        w = self.gate(x).softmax(-1)
        top, at = w.topk(2, -1)
        if FAULT == "gate_detached":
            top = top.detach()
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mine = (top * (at == e)).sum(-1, keepdim=True)
            out = out + mine * expert(x)  # all experts are called on all ranks
        return out


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.moe = MoE()

    def forward(self, x):
        y = self.n1(x)
        q, k, v = (at(y).unsqueeze(1) for at in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.moe(self.n2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, x, y):
        x = self.emb(x)
        for b in self.blocks:
            x = b(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), y.flatten())


sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = Net()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 10**6,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": A.stage,
        "stage3_param_persistence_threshold": 40,
        "overlap_comm": False,
    },
    "gradient_clipping": 1.0,
}
if A.bf16:
    config["bf16"] = {"enabled": True}
if FAULT == "rate" and dist.get_rank() == 1:
    lr = 3e-3
else:
    lr = 1e-3
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=lr), config=config
)
data = Texts()
sampler = DistributedSampler(data, shuffle=False) if FAULT != "sampler" else None
loader = DataLoader(data, 4, sampler=sampler)
Z = engine.optimizer
if FAULT == "late" and dist.get_world_size() > 1:  # the flat gradient is read one element late
    flat = Z.flatten

    def late(tensors):
        out = flat(tensors)
        return torch.cat([out[1:], out[:1]])

    Z.flatten = late
    if hasattr(Z, "flatten_dense_tensors_aligned"):
        aligned = Z.flatten_dense_tensors_aligned

        def late_aligned(t, n):
            out = aligned(t, n)
            return torch.cat([out[1:], out[:1]])

        Z.flatten_dense_tensors_aligned = late_aligned
if FAULT == "sum":
    engine.gradient_predivide_factor = 1.0
    scale = dist.get_world_size()
else:
    scale = 1
if FAULT == "expert_scaled" and dist.get_world_size() > 1:
    for n, p in model.named_parameters():
        if "experts.1" in n:
            p.register_hook(lambda g: g * 2)
for step, (x, y) in enumerate(loader):
    loss = engine(x, y) * scale
    if FAULT == "accumulation":
        loss = loss / 2
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0:
        print(step, float(loss), flush=True)
dist.destroy_process_group()
