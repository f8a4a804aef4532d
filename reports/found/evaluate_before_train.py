"""accelerate: prepare_model(evaluation_mode=True), as Trainer.evaluate() calls it, and then prepare
leave the model without DistributedDataParallel.

Needs torch and accelerate, two processes on the CPU (gloo). Exit code 1 if it shows, 0 if not.
"""

import os
import socket
import sys

import accelerate
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, port, evaluates, results):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    if evaluates:
        accelerator.prepare_model(model, evaluation_mode=True)
        accelerator.free_memory()
    model = accelerator.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(3):
        accelerator.backward(model(torch.randn(8, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    weight = next(model.parameters()).detach()
    weights = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(weights, weight)
    if rank == 0:
        results.put((type(model).__name__, torch.equal(*weights)))
    dist.destroy_process_group()


def trained(evaluates):
    """Returns the class of the prepared model, and whether its weights are equal on both ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(train, (port, evaluates, results), nprocs=2)
    return results.get()


if __name__ == "__main__":
    print(f"accelerate {accelerate.__version__}, torch {torch.__version__}")
    name, equal = trained(False)
    print(f"prepare: {name}, weights equal on both ranks: {equal}")
    assert equal, "the control must hold"
    name, equal = trained(True)
    print(f"prepare_model(evaluation_mode=True), then prepare: {name}, equal: {equal}")
    sys.exit(not equal)
