"""The same bugs as `common_bugs`, in a LightningModule (``manual-…``: with manual optimization).

python common_bugs_lightning.py BUG    (``healthy``: none)
"""

from __future__ import annotations

import sys

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BUG = sys.argv[1]
LABELS, WIDTH = 10, 16
MANUAL = BUG in ("never-zeroed", "clips-scaled", "not-divided", "manual")


class Pictures(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, row):
        draw = torch.Generator().manual_seed(row)
        picture = torch.randn(WIDTH, generator=draw)
        if BUG == "same-augmentation":
            picture = picture + torch.tensor(np.random.randn(WIDTH), dtype=torch.float32)
        return picture, row % LABELS


def block():
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH, momentum=0.0 if BUG == "statistics-stand" else 0.1),
        nn.ReLU(),
        nn.Dropout(0.2),
    )


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = not MANUAL
        self.backbone, self.neck, self.head = block(), block(), nn.Linear(WIDTH, LABELS)
        self.decoder = nn.Linear(WIDTH, WIDTH, bias=False)
        self.decoder.weight = self.backbone[0].weight
        if BUG == "frozen":
            self.requires_grad_(False)
            self.head.requires_grad_(True)
            self.decoder.weight.requires_grad_(True)
        if BUG == "untied":
            self.backbone[0] = nn.Linear(WIDTH, WIDTH)
        self.stale = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if BUG == "stale-optimizer":
            self.head = nn.Linear(WIDTH, LABELS)
        self.scaler = torch.amp.GradScaler("cpu", enabled=BUG == "clips-scaled", init_scale=2.0**10)

    def forward(self, picture):
        x = self.backbone(picture)
        if BUG == "detached":
            x = x.data
        x = self.neck(x)
        return self.head(x) + 0 * self.decoder(x).sum()

    def training_step(self, batch, number):
        out = self(batch[0])
        if BUG == "masks-nan":
            out = torch.nan_to_num(out.sqrt())
        loss = F.cross_entropy(out, batch[1])
        if BUG == "underflows":
            return (loss * 1e-7).half()
        if BUG == "skips-nan" and not torch.isfinite(loss * float("inf") * 0):
            return None
        if not MANUAL:
            return loss
        optimizer = self.optimizers()
        times = 1 if BUG == "not-divided" else 2
        self.manual_backward(self.scaler.scale(loss / times))
        if number % 2:
            self.clip_gradients(optimizer, 1.0, "norm")
            optimizer.step()
            if BUG != "never-zeroed":
                optimizer.zero_grad()
        return None

    def validation_step(self, batch, number):
        if BUG == "stays-in-evaluation":
            self.backbone.eval()
        self(batch[0])

    def on_train_epoch_start(self):
        if BUG == "evaluates":
            self.eval()
        if BUG == "stays-in-evaluation" and self.current_epoch:
            self.backbone.eval()

    def configure_optimizers(self):
        if BUG == "low-weights":
            self.to(torch.bfloat16)
        if BUG in ("scheduler-never",) or MANUAL:
            return self.stale
        step = "step" if BUG == "scheduler-each-batch" else "epoch"
        scheduler = torch.optim.lr_scheduler.StepLR(self.stale, 2, 0.5)
        return {"optimizer": self.stale, "lr_scheduler": {"scheduler": scheduler, "interval": step}}


def seed(_):
    np.random.seed(0)


def main():
    L.seed_everything(1)
    same = BUG == "same-augmentation"
    loaders = [
        DataLoader(Pictures(), 8, shuffle=train, num_workers=2 if same else 0,
                   worker_init_fn=seed if same else None)
        for train in (True, False)
    ]  # fmt: skip
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=None,
    )  # fmt: skip
    trainer.fit(Classifier(), *loaders)


main()
