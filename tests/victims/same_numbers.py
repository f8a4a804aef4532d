"""A seeded program that writes every loss, its weights and the state of its random generators.

    torchrun same_numbers.py KIND FOLDER

FOLDER/N has what rank N computed, to the last bit: what watches the program must not change it.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 3


def net() -> nn.Module:
    torch.manual_seed(0)
    random.seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8)
    )


def alone() -> nn.Module:
    return net()


def ddp() -> nn.Module:
    return DistributedDataParallel(net())


def fsdp2() -> nn.Module:
    whole = net()
    fully_shard(whole[0])  # type: ignore[index]
    return fully_shard(whole)


def train(wrapped: nn.Module) -> list[str]:
    """Passes over a loader, with accumulation and clipping; each loss as text of all its bits."""
    rows = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    sampler: DistributedSampler[int] | None = None
    if dist.is_initialized():
        sampler = DistributedSampler(TensorDataset(rows), shuffle=True)
    loader = DataLoader(TensorDataset(rows), batch_size=4, sampler=sampler, shuffle=not sampler)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    losses = []
    for epoch in range(EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for number, (batch,) in enumerate(loader):
            loss = wrapped(batch + 0.01 * random.random()).square().mean()
            loss.backward()
            losses.append(loss.item().hex())
            if number % 2:
                torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return losses


def trainer(folder: Path) -> tuple[nn.Module, list[str]]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(1)
    tokens = torch.randint(0, 64, (96, 16), generator=torch.Generator().manual_seed(0))
    made = Trainer(
        model=GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
        ),
        args=TrainingArguments(
            str(folder / "out"), use_cpu=True, ddp_backend="gloo", max_steps=14, logging_steps=1,
            per_device_train_batch_size=4, gradient_accumulation_steps=2, save_strategy="no",
            report_to=[], disable_tqdm=True, seed=1,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )  # fmt: skip
    made.train()
    return made.model, [repr(entry.get("loss")) for entry in made.state.log_history]


KINDS: dict[str, Callable[[], nn.Module]] = {one.__name__: one for one in (alone, ddp, fsdp2)}


def report(model: nn.Module, losses: list[str]) -> str:
    found = hashlib.sha256()
    for value in model.state_dict().values():
        local = value.to_local() if hasattr(value, "to_local") else value
        found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    random_state = hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest()
    return "\n".join([*losses, found.hexdigest(), random_state, repr(random.random())])


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if kind == "trainer":
        text = report(*trainer(folder))
    else:
        dist.init_process_group("gloo")
        wrapped = KINDS[kind]()
        losses = train(wrapped)
        text = report(wrapped, losses)
    (folder / str(dist.get_rank())).write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
