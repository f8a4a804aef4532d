"""A linear model trained by Ray Train's TorchTrainer on two CPU workers."""

import sys
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from torch.utils.data import DataLoader, TensorDataset


def rows():
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    return TensorDataset(x, x.sum(1, keepdim=True))


def loop(config):
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    loader = ray.train.torch.prepare_data_loader(DataLoader(rows(), batch_size=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank = ray.train.get_context().get_world_rank()
    for epoch in range(config["epochs"]):
        for step, (x, y) in enumerate(loader):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
        ray.train.report({"loss": loss.item()})


def main():
    ray.init(num_cpus=3, include_dashboard=False, logging_level="error")
    trainer = ray.train.torch.TorchTrainer(
        loop,
        train_loop_config={"epochs": 3},
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False),
        run_config=ray.train.RunConfig(storage_path=str(Path(sys.argv[1]).resolve()), name="run"),
    )
    print("result", trainer.fit().metrics)


if __name__ == "__main__":
    main()
