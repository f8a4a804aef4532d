"""Measuring from inside a program that knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moediag.protocol import Measured, MeasureRequest, read_measured
from moediag.protocol.measured import (
    IN_TURN,
    JOINED,
    MEASURED_ENOUGH,
    start_tensors,
    step_tensors,
)
from moediag.ranks.verify import (
    clips,
    comparison,
    ending,
    model_facts,
    model_pieces,
    tensor_files,
)
from moediag.ranks.verify.ending import Continuing
from moediag.ranks.verify.measuring import Measuring
from moediag.ranks.verify.runs import Run
from moediag.ranks.verify.tensor_files import Stored
from tests.unit.fake_ranks import fake_rank

Start = Callable[..., Path]


@pytest.fixture
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Installs the measuring; returns its folder. Removes it from torch afterwards."""
    installed: list[Measuring] = []
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def start(name: str = "run", **request: object) -> Path:
        folder = tmp_path / name
        given = {"folder": str(folder), "steps": 2, **request}
        one = Measuring(MeasureRequest(**given), Continuing())  # type: ignore[arg-type]
        one.install()
        installed.append(one)
        return folder

    yield start
    for one in reversed(installed):
        one.remove()


def small() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model: nn.Module, steps: int = 2, clip: float | None = 0.01) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def of(folder: Path) -> Measured:
    return read_measured(folder)[0]


def test_steps_are_measured(measuring: Start) -> None:
    folder = measuring()
    model = small()
    began = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model)
    found = of(folder)
    assert found.done
    assert not found.random
    assert found.problems == []
    assert (found.rank, found.world_size, len(found.steps)) == (0, 1, 2)
    assert found.dtypes == ["float32"]
    step = found.steps[0]
    assert len(set(step.samples)) == 4
    assert len(step.losses) == 1
    assert step.rates == dict.fromkeys(began, 0.5)
    start = tensor_files.load(folder / start_tensors(0))["start"]
    assert all(torch.equal(start[name].tensor, began[name]) for name in began)  # type: ignore[arg-type]
    groups = tensor_files.load(folder / step_tensors(0, 1))
    norms = [g.tensor.norm() for g in groups["gradients"].values() if g.tensor is not None]
    assert step.norm == pytest.approx(float(torch.stack(norms).norm()), rel=1e-5)  # not yet clipped
    moved = groups["weights"]["0.weight"].tensor
    assert moved is not None
    assert not torch.equal(moved, began["0.weight"])


def test_how_much_gradients_shrank_is_measured_exactly() -> None:
    """From it follows a norm that no rank has whole; gradients may be tiny."""
    model = small()
    model(torch.ones(4, 3)).square().mean().backward()
    own = {piece.name: piece for piece in model_pieces.pieces(model)}
    unclipped = {name: Stored(piece.where, 1e-6 * piece.gradient()) for name, piece in own.items()}
    for parameter in model.parameters():
        parameter.grad *= 0.25e-6
    assert clips._times(unclipped, own) == pytest.approx(0.25)
    assert clips._times({}, own) is None


def test_a_step_without_clipping_has_no_norm(measuring: Start) -> None:
    folder = measuring()
    train(small(), clip=None)
    assert [step.norm for step in of(folder).steps] == [None, None]


def test_gradients_that_a_fused_optimizer_unscales_itself(measuring: Start) -> None:
    """They are the loss scale times too large until its step() divides them."""
    measured = []
    for scale in (1.0, 4.0):
        folder = measuring(f"scale {scale}", steps=1)
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
        scaler.step(optimizer)
        measured.append(tensor_files.load(folder / step_tensors(0, 1))["gradients"])
    plain, scaled = measured
    assert plain.keys() == scaled.keys() and plain
    for name, one in plain.items():
        assert torch.allclose(one.tensor, scaled[name].tensor)  # type: ignore[arg-type]


def test_the_end_of_a_program_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends when all ranks were measured, and what it printed is not lost."""
    calls = []

    class Stream:
        def flush(self) -> None:
            calls.append("flush")

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(ending.sys, name, Stream())
    monkeypatch.setattr(ending.os, "_exit", lambda code: calls.append(f"exit {code}"))
    monkeypatch.setattr(ending.time, "sleep", lambda _: (tmp_path / MEASURED_ENOUGH).touch())
    ending.Ending(tmp_path, lambda: calls.append("at end"))._end()
    assert calls == ["flush", "flush", "at end", "exit 0"]
    assert (tmp_path / MEASURED_ENOUGH).exists()  # it waited for the file


def test_evaluation_is_not_measured(measuring: Start) -> None:
    folder = measuring()
    model = small()
    with torch.no_grad():
        model(torch.ones(7, 3))
    assert read_measured(folder) == {}
    train(model, steps=1)
    assert len(of(folder).steps[0].samples) == 4


def test_random_numbers_in_a_forward_are_noticed(measuring: Start) -> None:
    first = measuring("noise")
    train(nn.Sequential(nn.Linear(3, 2), nn.RReLU()))
    assert of(first).random
    assert of(first).across_samples == ""


def test_batch_normalisation_is_noticed(measuring: Start) -> None:
    folder = measuring()
    train(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    assert of(folder).across_samples == "BatchNorm1d"
    assert not of(folder).random


def test_autocast_inside_a_forward_is_noticed(measuring: Start) -> None:
    class Low(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                result: torch.Tensor = self.inner(x)
            return result.float()

    folder = measuring()
    train(Low(), clip=None)
    assert of(folder).dtypes == ["bfloat16", "float32"]


def test_an_auxiliary_loss_is_noticed(measuring: Start) -> None:
    class Output(torch.Tensor):
        aux_loss = 0.0

    class Routed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).as_subclass(Output)

    folder = measuring()
    train(Routed(3, 2), clip=None)
    assert of(folder).auxiliary


def test_two_optimizers_share_a_step(measuring: Start) -> None:
    folder = measuring(steps=2)
    model = small()
    both = [torch.optim.SGD(model[i].parameters(), lr=rate) for i, rate in ((0, 0.1), (2, 0.2))]
    for _ in range(2):
        model(torch.ones(4, 3)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        for optimizer in both:
            optimizer.step()
    found = of(folder)
    assert found.done
    assert found.steps[0].rates == {
        "0.weight": 0.1, "0.bias": 0.1, "2.weight": 0.2, "2.bias": 0.2,
    }  # fmt: skip
    gradients = tensor_files.load(folder / step_tensors(0, 1))["gradients"]
    assert set(gradients) == set(found.steps[0].rates)
    norms = [g.tensor.norm() for g in gradients.values() if g.tensor is not None]
    assert float(torch.stack(norms).norm()) == pytest.approx(found.steps[0].norm, rel=1e-5)


def test_samples_of_all_micro_batches_belong_to_the_step(measuring: Start) -> None:
    folder = measuring(steps=1)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in torch.arange(12.0).view(4, 3).split(2):
        model(part).square().mean().backward()
    optimizer.step()
    assert len(set(of(folder).steps[0].samples)) == 4
    assert len(of(folder).steps[0].losses) == 2


def test_an_optimizer_of_copies_is_said(measuring: Start) -> None:
    folder = measuring(steps=1)
    model = small()
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
    assert of(folder).done
    assert "holds no parameter of the model" in of(folder).problems[0]


def test_what_the_optimizer_has_is_told(measuring: Start) -> None:
    folder = measuring(steps=2)
    model = small()
    model.append(nn.Linear(2, 2, bias=False))
    model.append(model[3])
    other = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([*model[0].parameters(), other], lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
    found = of(folder)
    assert found.foreign
    assert found.tied == {"4.weight": "3.weight"}
    assert [step.updates for step in found.steps] == [
        {"0.weight": count, "0.bias": count} for count in (1.0, 2.0)
    ]
    assert found.averages_over == []


def test_only_a_wrapper_over_all_ranks_is_known_to_average_gradients() -> None:
    """Beside tensor parallelism FSDP2's ranks are a part of them."""
    with fake_rank(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        beside = fully_shard(small(), mesh=mesh["dp"])
        alone = fully_shard(small(), mesh=init_device_mesh("cpu", (4,)))
        wrapped = nn.parallel.DistributedDataParallel(small())
        found = [model_facts.averages_over(one) for one in (alone, wrapped, beside, small())]
    assert found == [[0, 1, 2, 3], [0, 1, 2, 3], [], []]


# ------------------------------------------------------------------------ the reference


def measured_job(measuring: Start) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = measuring("job", steps=1)
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, steps=1)
    return folder, weights


def test_the_reference_starts_from_the_weights_of_the_job(measuring: Start) -> None:
    job, weights = measured_job(measuring)
    folder = measuring("reference", steps=1, start_from=str(job))
    train(small(), steps=1)
    start = tensor_files.load(folder / start_tensors(0))["start"]
    assert all(torch.equal(start[name].tensor, weights[name]) for name in weights)  # type: ignore[arg-type]


def test_rounding_changes_each_weight_a_little(measuring: Start) -> None:
    job, weights = measured_job(measuring)
    folder = measuring("reference", steps=1, start_from=str(job), rounding="bfloat16")
    train(small(), steps=1)
    start = tensor_files.load(folder / start_tensors(0))["start"]
    for name, weight in weights.items():
        moved = (start[name].tensor / weight - 1).abs()  # type: ignore[operator]
        assert moved.min() > 2**-9
        assert moved.max() < 2**-7


def test_another_model_is_said_and_left_alone(measuring: Start) -> None:
    job, _ = measured_job(measuring)
    folder = measuring("reference", steps=1, start_from=str(job))
    model = nn.Sequential(nn.Linear(3, 5))
    before = model[0].weight.detach().clone()
    model(torch.ones(4, 3))
    assert of(folder).done
    assert "0.weight" in of(folder).problems[0]
    assert "[4, 3] there and [5, 3] in one process" in of(folder).problems[0]
    assert torch.equal(model[0].weight, before)


def test_a_second_process_of_a_rank_measures_nothing(measuring: Start) -> None:
    folder = measuring(steps=1)
    train(small(), steps=1)
    first = (folder / "rank-0.measured.json").read_text()
    measuring(steps=1)
    train(small(), steps=1)
    assert (folder / "rank-0.measured.json").read_text() == first


def test_a_disk_without_room_is_said(measuring: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from moediag.ranks.verify import tensor_files

    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(tensor_files.shutil, "disk_usage", lambda folder: usage)
    folder = measuring(steps=1)
    train(small(), steps=1)
    assert "of disk" in of(folder).problems[0]
    assert not list(folder.glob("*.pt"))


def test_a_part_that_is_called_by_itself_is_no_other_model(measuring: Start) -> None:
    folder = measuring()
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1](model(torch.randn(4, 3))).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    start = tensor_files.load(folder / start_tensors(0))["start"]
    assert not any(name.startswith("model2") for name in start)


class TestReplayedSamples:
    """A program whose loader shuffles with a seed of its own on each rank."""

    def draws(self, seed: int, dropout: float = 0.0, words: bool = False) -> None:
        model = nn.Sequential(small(), nn.Dropout(dropout))
        rows = [{"x": torch.full((3,), float(n)), "y": n} for n in range(40)]
        batches = torch.utils.data.DataLoader(
            rows if not words else [object()] * 40,  # type: ignore[arg-type]
            4, shuffle=True, generator=torch.Generator().manual_seed(seed),
            collate_fn=(lambda given: given) if words else None,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            optimizer.zero_grad()
            rows = torch.ones(4, 3) * seed if words else batch["x"]  # type: ignore[assignment]
            model(rows).square().mean().backward()
            optimizer.step()

    def ranks(self, start: Start, monkeypatch: pytest.MonkeyPatch, **how: bool) -> Path:
        monkeypatch.setenv("WORLD_SIZE", "2")
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            folder = start("ranks")
            self.draws(rank, **how)
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
        return folder

    @pytest.mark.parametrize(("how", "merged"), [(JOINED, 1), (IN_TURN, 2)])
    def test_one_process_sees_those_of_the_ranks(
        self, measuring: Start, monkeypatch: pytest.MonkeyPatch, how: str, merged: int
    ) -> None:
        ranks = self.ranks(measuring, monkeypatch)
        of = read_measured(ranks)
        assert of[0].drawn == "batches" and of[0].form == of[1].form
        start = {"start_from": str(ranks), "replayed": how, "merged": merged}
        plain = getattr(torch.optim.SGD.step, "__wrapped__", torch.optim.SGD.step)
        monkeypatch.setattr(torch.optim.SGD, "step", plain)  # as in a new process
        folder = measuring("alone", **start)
        self.draws(seed=7)
        (found,) = read_measured(folder).values()
        assert not found.problems
        for step in range(2):
            every = [row for one in of.values() for row in one.steps[step].samples]
            assert found.steps[step].samples == every

    def test_samples_that_no_file_can_hold(
        self, measuring: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        of = read_measured(self.ranks(measuring, monkeypatch, words=True))
        assert [one.drawn for one in of.values()] == ["", ""]

    def test_dropout_is_off(self, measuring: Start) -> None:
        folder = measuring()
        self.draws(0, dropout=0.5)
        (found,) = read_measured(folder).values()
        assert not found.random
        assert found.not_checked == ["dropout: it is turned off in all runs"]


class Stage(nn.Module):
    """Some layers of a model; a stage of a pipeline counts them from 0."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)][first : first + count])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def step_of(stage: Stage, x: torch.Tensor, sent: torch.Tensor | None, **request: object) -> Run:
    """Measures a step of one process or stage, whose output gets the gradient ``sent``."""
    one = Measuring(MeasureRequest(**{"steps": 1, **request}), Continuing())  # type: ignore[arg-type]
    one.install()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    out = stage(x)
    (out.square().mean() if sent is None else (out * sent).sum()).backward()
    optimizer.step()
    one.remove()
    return Run.read(Path(str(request["folder"])))


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_stages_that_count_their_layers_from_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: float
) -> None:
    """``times``: what the second stage does to the gradient that it sends."""
    x = torch.rand(4, 3)
    given = Stage(0, 2)(x).detach().requires_grad_()
    Stage(2, 2)(given).square().mean().backward()
    assert given.grad is not None
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, (own, sent) in enumerate([(x, times * given.grad), (given, None)]):
        monkeypatch.setenv("RANK", str(rank))
        job = step_of(Stage(2 * rank, 2), own, sent, folder=str(tmp_path / "job"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    alone = [
        step_of(
            Stage(0, 4), x, None, folder=str(tmp_path / name), start_from=str(job.folder),
            rounding="float32" if name == "rounded" else None,
        )
        for name in ("first", "again", "rounded")
    ]  # fmt: skip
    assert alone[0].ranks[0].renamed["1"] == {"layers.": 2}
    found = comparison.outcomes(job, alone)
    assert [one.incomparable for one in found] == ["", ""]
    wrong = [{n for n, e in one.gradients["1"].items() if e.wrong} for one in found]
    names = {f"layers.{at}.{name}" for at in (0, 1) for name in ("weight", "bias")}
    assert wrong == [names if times != 1.0 else set(), set()]
    assert {n for one in found for n in one.gradients["1"]} > names
    if times != 1.0:
        factors = [one.first_wrong.factors for one in found if one.first_wrong is not None]
        assert factors == [pytest.approx([2.0]), pytest.approx([1.0])]
