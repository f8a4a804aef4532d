"""Tests in the style of accelerate's own (its functions, its set-up), with one planted line each.
`# PLANTED 1`: the line, and the rank at fault; `-` where nothing tells which rank was meant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.test_utils.scripts import test_ops as ops
from accelerate.test_utils.scripts import test_script as script
from accelerate.test_utils.scripts import test_sync as sync
from accelerate.utils.operations import (
    broadcast,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)

for module in (ops, script, sync):
    for name in dir(module):
        if name.startswith("test_"):
            getattr(module, name).__test__ = False


@pytest.fixture
def state() -> Iterator[PartialState]:
    yield PartialState(cpu=True)
    torch.distributed.destroy_process_group()


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    torch.distributed.destroy_process_group()


@pytest.mark.ranks(2)
def test_ok_gather(state: PartialState) -> None:
    ops.test_gather(state)


@pytest.mark.ranks(2)
def test_ok_trigger(accelerator: Accelerator) -> None:
    script.test_trigger()


@pytest.mark.ranks(2, laws=True)
def test_ok_sync(accelerator: Accelerator) -> None:
    sync.test_distributed_sync_multiple_fwd(accelerator)


def test_ok_without_ranks() -> None:
    assert "RANK" not in os.environ


@pytest.mark.ranks(2)
def test_bad_gather(state: PartialState) -> None:
    tensor = ops.create_tensor(state)
    if state.process_index == 1:
        return  # PLANTED -
    gather(tensor)  # WAITS


@pytest.mark.ranks(2)
def test_bad_gather_object(state: PartialState) -> None:
    if state.process_index == 0:
        gather_object([0])  # PLANTED 0
    state.wait_for_everyone()  # WAITS


@pytest.mark.ranks(2)
def test_bad_broadcast(state: PartialState) -> None:
    tensor = ops.create_tensor(state)
    for _ in range(2 + (state.process_index == 1)):
        tensor = broadcast(tensor)  # PLANTED -
    state.wait_for_everyone()  # WAITS


@pytest.mark.ranks(2)
def test_bad_pad(state: PartialState) -> None:
    tensor = torch.arange(state.num_processes + state.is_main_process)
    if state.process_index == 1:
        tensor = pad_across_processes(tensor)  # PLANTED 1
    reduce(tensor, "sum")  # WAITS


@pytest.mark.ranks(2)
def test_bad_trigger(accelerator: Accelerator) -> None:
    if accelerator.is_main_process:
        accelerator.set_trigger()
        assert accelerator.check_trigger()  # PLANTED 0
    accelerator.wait_for_everyone()  # WAITS


@pytest.mark.ranks(3)
def test_bad_wait(accelerator: Accelerator) -> None:
    if accelerator.process_index == 2:
        while os.getpid():  # PLANTED 2
            pass
    accelerator.wait_for_everyone()  # WAITS


@pytest.mark.ranks(3)
def test_bad_exit(accelerator: Accelerator) -> None:
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1:
        os._exit(0)  # PLANTED 1
    accelerator.wait_for_everyone()  # WAITS


def train(
    accelerator: Accelerator, lr: float = 0.1, left_out: int = -1, local: bool = False
) -> None:
    _, model, loader = sync.get_training_setup(accelerator)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x, y = next(iter(loader)).values()
    for step in range(6):
        if local:
            with accelerator.no_sync(model):
                sync.step_model(model, x, y, accelerator)
        else:
            sync.step_model(model, x, y, accelerator)
        if step != left_out:
            optimizer.step()  # WAITS
        optimizer.zero_grad()


def of_rank(accelerator: Accelerator, value: Any, other: Any) -> Any:
    """``value`` on rank 2, else ``other``."""
    return value if accelerator.process_index == 2 else other


@pytest.mark.ranks(3, laws=True)
def test_bad_lr(accelerator: Accelerator) -> None:
    train(accelerator, lr=of_rank(accelerator, 0.2, 0.1))  # PLANTED 2


@pytest.mark.ranks(3, laws=True)
def test_bad_left_out_step(accelerator: Accelerator) -> None:
    train(accelerator, left_out=of_rank(accelerator, 1, -1))  # PLANTED 2


@pytest.mark.ranks(2, laws=True)
def test_bad_no_sync(accelerator: Accelerator) -> None:
    train(accelerator, local=True)  # PLANTED -


@pytest.mark.ranks(3, laws=True)
def test_bad_overwritten(accelerator: Accelerator) -> None:
    _, model, loader = sync.get_training_setup(accelerator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = next(iter(loader)).values()
    for step in range(4):
        sync.step_model(model, x, y, accelerator)
        optimizer.step()  # WAITS
        optimizer.zero_grad()
        if step == 1 and accelerator.process_index == 2:
            model.module.a.data.mul_(1.5)  # PLANTED 2
