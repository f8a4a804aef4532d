"""A small classifier trained by Lightning with its own DDP strategy."""

import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


def rows(size):
    torch.manual_seed(0)
    return TensorDataset(torch.randn(size, 16), torch.randint(0, 4, (size,)))


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self(x), y)
        self.log("val_loss", loss, sync_dist=True)

    def on_train_epoch_end(self):
        loss = self.trainer.callback_metrics["loss"]
        self.print(f"epoch {self.current_epoch}: loss {float(loss):.4f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    lightning.seed_everything(1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=sys.argv[1],
        enable_checkpointing=True,
    )
    train = DataLoader(rows(96), batch_size=8)
    val = DataLoader(rows(32), batch_size=8)
    trainer.fit(Classifier(), train, val)


if __name__ == "__main__":
    main()
