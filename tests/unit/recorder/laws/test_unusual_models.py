"""What one rank records of models and loaders that are not as they should be: a teacher with
dropout, tensors that nothing was written into, frozen parameters, samples that are divided twice, a
loss that is always the same."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler  # noqa: E402

from moediag.diagnosis import diagnose  # noqa: E402
from moediag.recorder.laws import model_values  # noqa: E402
from moediag.recorder.laws.replica_sets import ReplicaSets  # noqa: E402
from moediag.result import Diagnosis  # noqa: E402
from tests.unit.law_evidence import job  # noqa: E402
from tests.unit.recorder.written import laws  # noqa: E402

pytestmark = pytest.mark.usefixtures("recorder")


def diagnosed(folder: Path) -> Diagnosis:
    """What the records of the only rank show."""
    return diagnose(replace(job(1), ranks={0: replace(job(1).ranks[0], laws=laws(folder))}))


def model(rate: float = 0.1) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(rate), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("rate", "training", "gradients", "moves", "found"),
    [(0.1, True, False, False, True), (0.0, True, False, False, False),
     (0.1, False, False, False, False), (0.1, True, True, False, False),
     (0.1, True, False, True, False)],
    ids=["drops out", "no dropout", "evaluation", "with gradients", "an average"],
)  # fmt: skip
def test_a_teacher_that_drops_out(
    tmp_path: Path, rate: float, training: bool, gradients: bool, moves: bool, found: bool
) -> None:
    net, teacher = model(), model(rate).train(training).requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(12):
        batch = torch.randn(2, 4)
        with torch.set_grad_enabled(gradients):
            wanted = teacher(batch).detach()
        (net(batch) - wanted).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if moves:
            teacher[0].weight.mul_(0.9)
    assert (
        any("which no optimizer trains" in one for one in diagnosed(tmp_path).suspicious) is found
    )


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("turns", torch.arange(4.0))

    def forward(self, x: Any) -> Any:
        return self.inner(x * (1 + 0 * torch.nan_to_num(self.turns)))


@pytest.mark.parametrize("how", ["none", "buffer", "data", "all"])
def test_what_nothing_was_written_into(tmp_path: Path, how: str) -> None:
    with torch.device("meta"):
        net = Turned()
    net.to_empty(device="cpu")
    for one in net.parameters():
        one.data = torch.randn(one.shape)  # what the memory has, and not zeros
    if how == "data":
        for one in net.parameters():
            one.data.normal_()
    elif how != "none":
        net.inner.reset_parameters()
    if how in ("all", "data"):
        net.turns.fill_(1.0)
    # Memory is read again as it is after to_empty.
    if how == "none":
        net = copy.deepcopy(net)
        net._apply = lambda *_, **__: net
        net.to_empty(device="cpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.randn(2, 4)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    of = diagnosed(tmp_path)
    told = {"none": "inner.{weight,bias}, turns", "buffer": "turns"}.get(how)
    found = [one for one in of.suspicious if "Nothing was written into" in one]
    assert len(found) == (told is not None) and all(f"into {told} between" in one for one in found)
    assert of.verdict == "clean"


@pytest.mark.parametrize("again", [False, True])
def test_samples_that_are_divided_twice(tmp_path: Path, again: bool) -> None:
    class Part(BatchSampler):  # as accelerate's
        def __init__(self, batch_sampler: BatchSampler) -> None:
            self.batch_sampler = batch_sampler
            self.num_processes, self.process_index = (2, 0) if again else (1, 0)

        def __iter__(self) -> Any:
            return iter(self.batch_sampler)

    data = [torch.randn(4) for _ in range(16)]
    sampler = DistributedSampler(data, 2, 0)  # type: ignore[arg-type, var-annotated]
    loader = DataLoader(data, batch_sampler=Part(BatchSampler(sampler, 2, False)))  # type: ignore[arg-type, var-annotated]
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in loader:
        net(batch).sum().backward()
        optimizer.step()
    found = laws(tmp_path).inputs
    assert {one.divided for one in found} == {4 if again else 2}
    assert {(one.sampler, one.replicas) for one in found} == {("DistributedSampler", 2)}


def test_frozen_parameters_of_a_wrapped_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReplicaSets, "data_parallel", lambda _self, _root: (0, 1))
    monkeypatch.setattr(model_values, "is_engine", lambda _root: True)
    net = model()
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD([net[2].weight, net[2].bias], lr=0.1)
    for _ in range(2):
        net(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    ((ranks, frozen),) = laws(tmp_path).models[-1].buffers
    assert (ranks, set(frozen)) == ((0, 1), {"0.weight", "0.bias"})


@pytest.mark.parametrize("parts", [1, 2])
def test_the_number_of_terms_of_a_loss(tmp_path: Path, parts: int) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        scores = net(torch.randn(2, 4))
        losses = [scores.exp().mean(), 0.1 * scores.sin().mean()]
        sum(losses[:parts]).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    settings = laws(tmp_path).others["settings"]
    assert all(f"terms of the loss = {parts}" in event["of"] for event in settings)
