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
from moediag.recorder.laws import model_inputs, model_values  # noqa: E402
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


@pytest.mark.parametrize("shape", [(6, 3), (6, 2, 200), (6,)])
def test_samples_that_a_loader_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """A row has one fingerprint, in whatever batch it is; labels alone tell nothing."""
    monkeypatch.setattr(model_inputs, "several_ranks", lambda: True)
    samples = torch.arange(torch.Size(shape).numel()).float().reshape(shape)
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]):
        for _ in DataLoader([{"x": samples[at]} for at in order], batch_size=2):
            net(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    rows = [row for event in laws(tmp_path).others.get("drawn", ()) for row in event["batches"]]
    assert [row[1:4] for row in rows] == (
        [[0, 1, 0], [0, 2, 1], [0, 3, 2], [1, 1, 3], [1, 2, 4], [1, 3, 5]] if shape[1:] else []
    )
    one, two = ([of for row in rows if row[1] == n for of in row[4]] for n in (0, 1))
    assert one == two[::-1] and len(set(one)) == len(one)


class Part(DistributedSampler[Any]):
    """Takes its part of an order of its own."""

    def __iter__(self) -> Any:
        return iter([3, 1, 2])


class Seen(torch.utils.data.Dataset[Any]):
    """Transforms samples at random; divides them itself if it has a rank."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> Any:
        return torch.randn(2) + at


@pytest.mark.parametrize(("workers", "own"), [(0, False), (1, False), (0, True)])
def test_samples_that_a_sampler_divides_have_indices(
    recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, own: bool
) -> None:
    """Also those after the last check. Indices of a dataset that is a part are those of others."""
    monkeypatch.setattr(model_inputs, "several_ranks", lambda: True)
    data, net = Seen(), nn.Linear(2, 1)
    if own:
        data.num_replicas, data.rank = 2, 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sampler = None if own else Part(data, 2, 0)
    loader = DataLoader(
        data, batch_size=2, sampler=sampler, num_workers=workers, persistent_workers=workers > 0
    )
    for last in (False, False, True):
        for batch in loader:
            net(batch).sum().backward()
            optimizer.step()
            if last:
                break
    for act in recorder.on_end:
        act()
    rows = [row for event in laws(tmp_path).others["drawn"] for row in event["batches"]]
    drawn = [row[4] for row in rows]
    assert drawn == [["3", "1"], ["2"], ["3", "1"], ["2"], ["3", "1"]] or (own and len(drawn) == 7)
    assert not own or len({row for batch in drawn for row in batch}) == 14


class Scaled(nn.Module):
    """Returns samples divided by a buffer, or one number of each."""

    def __init__(self, alike: bool = True, many: int = 4) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(many))
        self.alike = alike

    def forward(self, x: Any) -> Any:
        self.largest = torch.maximum(self.largest, x.detach().reshape(-1)[: len(self.largest)])
        return x / self.largest.max() if self.alike else x.sum(1)


@pytest.mark.parametrize(
    ("part", "names"),
    [(Scaled(), ["Scaled 1.largest"]), (Scaled(False), []), (Scaled(many=8), []),
     (nn.BatchNorm1d(4, affine=False), [])],
    ids=["a normalizer", "a metric", "a state of the batch", "a norm of torch"],
)  # fmt: skip
def test_buffers_of_modules_that_change_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: nn.Module, names: list[str]
) -> None:
    monkeypatch.setattr(model_values, "several_ranks", lambda: True)
    for name, buffer in part.named_buffers():
        part.register_buffer(name, buffer)  # as if it were made while recording
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        given = part(torch.randn(2, 4))
        net(given.reshape(-1, 4) if given.dim() > 1 else torch.ones(2, 4)).sum().backward()
        optimizer.step()
    rows = laws(tmp_path).others.get("statistics", ())
    assert sorted({name for row in rows for name in row["values"]}) == names
    assert not names or [row["step"] for row in rows] == [2, 3]


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


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.head(x + self.last(self.first(x)))


@pytest.mark.parametrize(("how", "steps"), [("none", 12), ("none", 2), ("data", 12), ("all", 12)])
def test_empty_memory_of_zeros(tmp_path: Path, how: str, steps: int) -> None:
    """As a GPU has it. A layer whose zeros were written by way of ``.data`` has gradients."""
    with torch.device("meta"):
        net = Branch()
    net.to_empty(device="cpu")
    net.first.weight.data.zero_()
    net.last.weight.data.zero_()
    net._apply = lambda *_, **__: net  # memory is read again as it is after to_empty
    net.to_empty(device="cpu")
    net.head.reset_parameters()
    if how != "none":
        net.first.reset_parameters()
    if how == "all":
        net.last.reset_parameters()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        (net(torch.ones(2, 4)) - 1).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [one for one in diagnosed(tmp_path).suspicious if "Nothing was written into" in one]
    assert len(found) == (how == "none" and steps > 2)
    assert all("into {first,last}.weight between" in one for one in found)


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
