"""Tests in the style of torchmetrics' own (its metrics, its gathers), with one planted line each:
see `planted.py`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
from torchmetrics.utilities.distributed import gather_all_tensors

LIMIT = 900  # seconds: a busy machine needs minutes to import torch on each rank


@pytest.fixture
def rank() -> Iterator[int]:
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.destroy_process_group()


class DummyMetric(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("x", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, x: torch.Tensor) -> None:
        self.x += x

    def compute(self) -> torch.Tensor:
        return self.x


@pytest.mark.ranks(2, timeout=LIMIT)
@pytest.mark.usefixtures("rank")
def test_ok_sum() -> None:
    dummy = DummyMetric()
    dummy.update(torch.tensor(1.0))
    assert dummy.compute() == 2


@pytest.mark.ranks(2, timeout=LIMIT)
def test_ok_uneven(rank: int) -> None:
    result = gather_all_tensors(torch.ones(rank + 1, 2 - rank))
    assert all((one == 1).all() for one in result)


@pytest.mark.ranks(2, timeout=LIMIT)
def test_bad_compute_on_one(rank: int) -> None:
    dummy = DummyMetric()
    dummy.update(torch.tensor(1.0))
    if rank == 0:
        dummy.compute()  # PLANTED 0
    dist.barrier()  # WAITS


@pytest.mark.ranks(3, timeout=LIMIT)
def test_bad_compute_left_out(rank: int) -> None:
    dummy = DummyMetric()
    dummy.update(torch.tensor(1.0))
    if rank == 2:
        return  # PLANTED 2
    dummy.compute()  # WAITS


@pytest.mark.ranks(3, timeout=LIMIT)
def test_bad_order(rank: int) -> None:
    metrics = [SumMetric(), BinaryAUROC()]
    if rank == 1:
        metrics.reverse()  # PLANTED 1
    for metric in metrics:
        if isinstance(metric, SumMetric):
            metric.update(torch.tensor(1.0))
        else:
            metric.update(torch.rand(8), torch.arange(8) % 2)
    for metric in metrics:
        metric.compute()  # WAITS


@pytest.mark.ranks(3, timeout=LIMIT)
def test_bad_state_is_empty(rank: int) -> None:
    metric = BinaryAUROC(thresholds=None)
    metric.update(torch.rand(8), torch.arange(8) % 2)
    if rank == 1:
        metric._reductions = {"preds": metric._reductions["preds"]}  # PLANTED 1
    metric.compute()  # WAITS


@pytest.mark.ranks(3, timeout=LIMIT)
def test_bad_assert(rank: int) -> None:
    metric = MulticlassAccuracy(num_classes=5)
    classes = 6 if rank == 1 else 5
    metric.update(torch.full((8,), classes - 1), torch.arange(8) % 5)  # PLANTED 1
    metric.compute()  # WAITS


@pytest.mark.ranks(3, timeout=LIMIT)
def test_bad_killed(rank: int) -> None:
    metric = MeanMetric()
    metric.update(1.0)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSEGV)  # PLANTED 2
    metric.compute()  # WAITS


@pytest.mark.ranks(2, timeout=LIMIT)
def test_bad_sleeps(rank: int) -> None:
    metric = MeanMetric()
    metric.update(1.0)
    if rank == 1:
        signal.pause()  # PLANTED 1
    metric.compute()  # WAITS


@pytest.mark.ranks(3, timeout=LIMIT)
def test_bad_group(rank: int) -> None:
    pair = dist.new_group([0, 1])
    metric = SumMetric(process_group=pair if rank < 2 else None)  # PLANTED -
    metric.update(torch.tensor(1.0))
    metric.compute()  # WAITS


def train(rank: int, *, lr: float = 0.1, batches: int = 5) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loss = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})
    torch.manual_seed(rank)
    for _ in range(batches):
        value = model(torch.randn(8, 4)).square().mean()
        loss.update(value.detach())
        optimizer.zero_grad()
        value.backward()  # WAITS
        optimizer.step()  # WAITS
    loss.compute()  # WAITS


@pytest.mark.ranks(2, laws=True, timeout=LIMIT)
def test_ok_train(rank: int) -> None:
    train(rank)


@pytest.mark.ranks(3, laws=True, timeout=LIMIT)
def test_bad_rate_of_own_metric(rank: int) -> None:
    own = SumMetric(sync_on_compute=False)
    own.update(float(rank == 2))
    train(rank, lr=0.1 + float(own.compute()))  # PLANTED 2


@pytest.mark.ranks(3, timeout=LIMIT)
def test_bad_one_batch_more(rank: int) -> None:
    train(rank, batches=5 + (rank == 0))  # PLANTED 0
