"""Training loops of libraries that communicate for the user, with one fault:
``torchrun … trainers.py LIBRARY FAULT``; ``ray`` starts its ranks itself.

Rank 1 has the fault in its last step; rank 0 waits for it inside the library, often below C++. The
line that a diagnosis must name ends with ``# HERE``; ``table.py`` says what else it must find.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
SIZE = 8


def endless() -> None:
    while True:  # HERE
        pass  # HERE


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # HERE


def slow() -> None:
    """Longer than the patience of its test."""
    count = 0
    while count < 40_000_000:
        count += 1


def raises() -> None:
    raise ValueError("bad row")  # HERE


FAULTS: dict[str, Callable[[], None]] = {
    "endless": endless, "stopped": stopped, "slow": slow, "raises": raises,
}  # fmt: skip


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """``blocks``: the last row is read from a pipe without a writer, in a loader's worker."""

    def __init__(self, blocks: bool) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.blocks and index == STEPS - 1:
            read, _ = os.pipe()
            os.read(read, 1)
        return torch.ones(SIZE)


class Batches:
    """The data of this rank. The fault strikes before the last batch."""

    def __init__(self, fault: str) -> None:
        self.fault = fault if os.environ["RANK"] == "1" else ""
        self.loader = torch.utils.data.DataLoader(
            Rows(self.fault == "loader"), num_workers=int(fault == "loader")
        )

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number, batch in enumerate(self.loader):  # HERE
            if number == STEPS - 1 and self.fault in FAULTS:
                FAULTS[self.fault]()
            yield batch


def network(buffers: bool) -> torch.nn.Module:
    layers = [torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU(), torch.nn.Linear(SIZE, 1)]
    if buffers:
        layers.insert(1, torch.nn.BatchNorm1d(SIZE, track_running_stats=True).eval())
    return torch.nn.Sequential(*layers)


def train(model: torch.nn.Module, fault: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in Batches(fault):
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------------ the libraries


def ddp(fault: str) -> None:
    """The buffers are broadcast before each forward."""
    train(DistributedDataParallel(network(buffers=True)), fault)


def ddp_without_buffers(fault: str) -> None:
    """The other ranks wait in the backward, below autograd's engine."""
    train(DistributedDataParallel(network(buffers=False)), fault)


def fsdp2(fault: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = network(buffers=False)
    for layer in model:
        fully_shard(layer)
    train(fully_shard(model), fault)


def accelerate(fault: str) -> None:
    from accelerate import Accelerator

    model = network(buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in Batches(fault):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()


def lightning(fault: str) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network(buffers=False)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.network(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        max_epochs=1, accelerator="cpu", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]),
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Module(), train_dataloaders=Batches(fault))


def ray(fault: str) -> None:
    """The ranks are actors that Ray starts, and each trains in a thread of its own."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer, prepare_model

    def train_rank(_: object) -> None:
        train(prepare_model(network(buffers=False)), fault)

    TorchTrainer(train_rank, scaling_config=ScalingConfig(num_workers=2)).fit()


LIBRARIES: dict[str, Callable[[str], None]] = {
    "ddp": ddp,
    "ddp_without_buffers": ddp_without_buffers,
    "fsdp2": fsdp2,
    "accelerate": accelerate,
    "lightning": lightning,
    "ray": ray,
}


def main(library: str, fault: str) -> None:
    if library == "ray":
        ray(fault)
        return
    dist.init_process_group("gloo")
    LIBRARIES[library](fault)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
