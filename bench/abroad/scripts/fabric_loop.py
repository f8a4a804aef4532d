"""A loop of one's own over Lightning Fabric: DDP, a metric reduced in every epoch, a checkpoint."""

import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


def rows(size):
    draw = torch.Generator().manual_seed(size)
    x = torch.randn(size, 8, generator=draw)
    return TensorDataset(x, x.sum(1, keepdim=True))


def validate(fabric, model, loader):
    total = torch.zeros(())
    with torch.no_grad():
        for x, y in loader:
            total += torch.nn.functional.mse_loss(model(x), y)
    return fabric.all_reduce(total / len(loader))


def main():
    fabric = lightning.Fabric(accelerator="cpu", devices=3, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train, held = fabric.setup_dataloaders(
        DataLoader(rows(144), batch_size=8, shuffle=True), DataLoader(rows(48), batch_size=8)
    )
    for epoch in range(4):
        for step, (x, y) in enumerate(train):
            loss = torch.nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        score = validate(fabric, model, held)
        fabric.print(f"epoch {epoch}: {score.item():.4f}")
        fabric.save(f"{sys.argv[1]}/epoch-{epoch}.ckpt", {"model": model, "step": step})


if __name__ == "__main__":
    main()
