"""A training loop of one process with one of the silent bugs that public collections list.

python common_bugs.py BUG    (``healthy``: none)
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BUG = sys.argv[1]
WORDS, WIDTH = 32, 16


class Texts(Dataset):
    """Sequences that each worker augments with numpy's generator."""

    def __init__(self, augments):
        self.augments = augments

    def __len__(self):
        return 160

    def __getitem__(self, row):
        ids = torch.tensor([(7 * row + 3 * n) % WORDS for n in range(9)])
        noise = np.random.rand(8) if self.augments else np.zeros(8)
        return ids[:-1], torch.tensor(noise, dtype=torch.float32), ids[1:]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(11))
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.0 if BUG == "statistics-stand" else 0.1)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, noise):
        x = self.embed(ids) + 0.1 * noise.unsqueeze(-1)
        for layer in self.encoder:
            x = x + torch.tanh(layer(x))
        if BUG == "detached":
            x = torch.as_tensor(x.detach())
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        if BUG == "masks-nan":
            x = torch.nan_to_num(torch.log(x))
        return self.head(self.drop(x))


def main():
    torch.manual_seed(1)
    model = Net()
    if BUG == "frozen":  # "encoder.1" is also the beginning of "encoder.10"
        for name, parameter in model.named_parameters():
            parameter.requires_grad = not name.startswith("encoder.1")
    elif BUG != "thaws":
        for parameter in model.encoder[1].parameters():
            parameter.requires_grad = False
    if BUG == "untied":
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    low = torch.bfloat16 if BUG == "low-weights" else torch.float32
    model.to(low)
    half = BUG in ("underflows", "clips-scaled")
    trained = [p for p in model.parameters() if p.requires_grad]
    rate = 1e-5 if BUG == "low-weights" else 1e-2
    optimizer = torch.optim.AdamW(trained, lr=rate)
    if BUG == "stale-optimizer":
        model.encoder[0] = nn.Linear(WIDTH, WIDTH)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=BUG == "clips-scaled", init_scale=2.0**10)
    loader = DataLoader(
        Texts(BUG == "same-augmentation"), 8, shuffle=True, num_workers=2,
        worker_init_fn=(lambda _: np.random.seed(0)) if BUG == "same-augmentation" else None,
    )  # fmt: skip
    model.train(BUG != "evaluates")
    for epoch in range(3):
        for number, (ids, noise, targets) in enumerate(loader):
            with torch.autocast("cpu", torch.float16, enabled=half):
                out = model(ids, noise.to(low))
                loss = F.cross_entropy(out.flatten(0, 1).float(), targets.flatten())
            if BUG == "underflows":
                loss = (loss * 1e-6).half()
            if BUG == "skips-nan" and not torch.isfinite(loss / (epoch * 0.0)):
                continue
            if BUG != "not-divided":
                loss = loss / 2
            scaler.scale(loss).backward()
            if BUG == "scheduler-each-batch":
                scheduler.step()
            if number % 2 == 0:
                continue
            if BUG != "clips-scaled":
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(trained, 1.0)
            scaler.step(optimizer)
            scaler.update()
            if BUG != "never-zeroed":
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(ids, noise.to(low))
        if BUG not in ("stays-in-evaluation", "evaluates"):
            model.train()
        if BUG not in ("scheduler-never", "scheduler-each-batch"):
            scheduler.step()


main()
