"""A small network trained by DeepSpeed's ZeRO. Its shared-memory kernel is not compiled: an
interrupted build leaves a lock on which later starts wait forever."""

import sys

import deepspeed
import torch
import torch.distributed as dist


def batches(count):
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        yield torch.randn(4, 16, generator=draw)


def evaluate(engine):
    with torch.no_grad():
        return engine(torch.ones(4, 16)).pow(2).mean().item()


def main(stage):
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 1)
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        },
    )
    for step, x in enumerate(batches(16)):
        loss = engine(x).pow(2).mean()
        engine.backward(loss)
        engine.step()
    score = evaluate(engine)
    if dist.get_rank() == 0:
        print(f"done, loss {loss.item():.4f}, score {score:.4f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
