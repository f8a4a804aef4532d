"""The first module that computes something wrong, from the calls of small models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moediag.protocol import outcome
from moediag.ranks.verify import first_wrong, samples
from moediag.ranks.verify.first_wrong import FirstWrong
from moediag.ranks.verify.merged_steps import MergedSteps
from moediag.ranks.verify.module_calls import Calls, ModuleCalls
from moediag.recorder.step.hooks import StepHooks

ROWS = torch.arange(12.0).view(4, 3).sin()


class Model(nn.Module):
    """``act`` is what the fault changes."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down, self.act = nn.Linear(3, 5), nn.Linear(5, 2), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


def calls(folder: Path, model: nn.Module, *batches: torch.Tensor, scale: float = 1.0) -> Calls:
    folder.mkdir()
    hooks, kept = StepHooks(), ModuleCalls()
    kept.add(model, "")

    def before(module: nn.Module, args: object, kwargs: object) -> nn.Module:
        kept.begin(samples.hashes(args, kwargs), samples.first(args, kwargs))
        return module

    hooks.around_forward(
        lambda _: True, before, lambda module, result: kept.returned(module, (), {}, result),
        kept.returned,
    )  # fmt: skip
    for rows in batches:
        (model(rows).square().mean() * scale).backward()
    hooks.remove()
    kept.write(folder, 0)
    found = Calls.read(folder, 0)
    assert found is not None
    return found


def first(tmp_path: Path, *ranks: Calls) -> list[outcome.WrongModule | None]:
    alone = calls(tmp_path / "alone", Model(), ROWS)
    found = FirstWrong(dict(enumerate(ranks)), alone, alone)
    return [found.of_rank(rank) for rank in range(len(ranks))]


def wrong_backward(x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x)
    return y.detach() + 0.5 * (y - y.detach())


@pytest.mark.parametrize(
    ("act", "name", "what"),
    [
        (torch.sigmoid, "down", outcome.INPUT),
        (wrong_backward, "up", outcome.GRADIENT),
        (torch.tanh, "", outcome.AFTER),
    ],
)
def test_the_first_wrong_value_of_a_data_parallel_rank(
    tmp_path: Path, act: Callable[[torch.Tensor], torch.Tensor], name: str, what: str
) -> None:
    """A rank has some of the samples, and a mean over fewer of them."""
    healthy = calls(tmp_path / "0", Model(), ROWS[:2])
    mine = calls(tmp_path / "1", Model(act), ROWS[2:])
    right, found = first(tmp_path, healthy, mine)
    assert right is not None
    assert (right.what, right.factors) == (outcome.AFTER, pytest.approx([2.0]))
    assert found is not None
    assert (found.name, found.what) == (name, what)
    if name:
        assert found.at.startswith("test_verify_first_wrong.py:")


def test_a_module_whose_own_output_is_wrong(tmp_path: Path) -> None:
    model = Model()
    model.up.bias.data += 1.0
    (found,) = first(tmp_path, calls(tmp_path / "0", model, ROWS))
    assert found is not None
    assert (found.name, found.kind, found.what) == ("up", "Linear", outcome.OUTPUT)


def test_parts_of_a_dim_are_found_by_their_values(tmp_path: Path) -> None:
    """Column parallel: each rank has some of the features, and not the rows of others."""
    halves = []
    for rank, part in enumerate((slice(0, 2), slice(2, 5))):
        model = Model()
        model.up.weight, model.up.bias = (
            nn.Parameter(p.detach()[part].clone()) for p in (model.up.weight, model.up.bias)
        )
        model.down.weight = nn.Parameter(model.down.weight.detach()[:, part].clone())
        halves.append(calls(tmp_path / str(rank), model, ROWS))
    found = first(tmp_path, *halves)[0]
    assert found is not None
    assert (found.name, found.what) == ("down", outcome.OUTPUT)  # its bias was added twice


class Sequence(nn.Module):
    """A part of sequences: each token attends to those that are ``given`` before it."""

    def __init__(self, at: torch.Tensor, given: torch.Tensor | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.place = nn.Embedding(50, 4), nn.Embedding(8, 4)
        self.out, self.at, self.given = nn.Linear(4, 4), at, given

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(self.at)
        # An exchange with other ranks, as a table: what stands before each position.
        past = torch.linspace(0.0, 1.0, 8)[self.at if self.given is None else self.given]
        return self.out(x * past.unsqueeze(-1))  # type: ignore[no-any-return]


TOKENS = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:48].view(6, 8)
CONTIGUOUS, ZIGZAG, STRIPED, UNEVEN = (
    [torch.tensor(part) for part in parts]
    for parts in (
        ([0, 1, 2, 3], [4, 5, 6, 7]), ([0, 1, 6, 7], [2, 3, 4, 5]),
        ([0, 2, 4, 6], [1, 3, 5, 7]), ([0, 1, 2], [3, 4, 5, 6, 7]),
    )
)  # fmt: skip


@pytest.mark.parametrize("parts", [CONTIGUOUS, ZIGZAG, STRIPED, UNEVEN])
@pytest.mark.parametrize("fault", ["", "positions", "exchange"])
def test_ranks_that_have_parts_of_sequences(
    tmp_path: Path, parts: list[torch.Tensor], fault: str
) -> None:
    """Two groups of ranks, each with other sequences; the reference makes one step of two."""
    alone = calls(tmp_path / "alone", Sequence(torch.arange(8)), TOKENS[:3], TOKENS[3:])
    ranks = []
    for rank in range(4):
        at, rows = parts[rank % 2], TOKENS[3 * (rank // 2) :][:3]
        model = Sequence(at)
        if rank == 1 and fault == "positions":
            model = Sequence(torch.arange(len(at)), at)
        elif rank == 1 and fault == "exchange":
            model = Sequence(at, at.flip(0))
        ranks.append(calls(tmp_path / str(rank), model, rows[:, at]))
    found = FirstWrong(dict(enumerate(ranks)), alone, alone)
    assert found.share([0, 1])
    assert not found.share([0, 2])
    healthy = found.of_rank(2)
    assert healthy is not None
    assert (healthy.what, healthy.compared) == (outcome.AFTER, 4)
    assert healthy.factors == pytest.approx([8 / len(parts[0])])
    wrong = found.of_rank(1)
    assert wrong is not None
    if fault:
        assert (wrong.name, wrong.what) == ("out", outcome.INPUT)
        assert wrong.moved == (["place"] if fault == "positions" else [])
    else:
        assert wrong.what == outcome.AFTER


def test_a_part_of_the_sequence_and_of_the_features(tmp_path: Path) -> None:
    """Context and tensor parallelism: an input of which two dims are parts is compared."""
    alone = calls(tmp_path / "alone", Sequence(torch.arange(8)), TOKENS[:3])
    at = ZIGZAG[0]
    model = Sequence(at)
    model.out.weight = nn.Parameter(model.out.weight.detach()[1:3])
    model.out.bias = nn.Parameter(model.out.bias.detach()[1:3])
    own = calls(tmp_path / "0", model, TOKENS[:3, at])
    found = FirstWrong({0: own}, alone, alone)
    assert [found._status(0, value) for value in first_wrong._forward(own)][-2:] == ["right"] * 2
    model.out.bias.data += 1.0
    own = calls(tmp_path / "1", model, TOKENS[:3, at])
    wrong = FirstWrong({0: own}, alone, alone).of_rank(0)
    assert wrong is not None
    assert (wrong.name, wrong.what, wrong.input_known) == ("out", outcome.OUTPUT, True)


def test_an_input_that_cannot_be_compared_is_not_called_right(tmp_path: Path) -> None:
    class Flat(nn.Module):
        """Its input has another shape than the reference's."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(4, 5)

    class Cut(Model):
        def __init__(self, shape: tuple[int, ...], plus: float) -> None:
            super().__init__()
            self.flat, self.shape, self.plus = Flat(), shape, plus

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.flat(self.up(x).reshape(self.shape) + self.plus))  # type: ignore[no-any-return]

    alone = calls(tmp_path / "alone", Cut((2, 10), 0.0), ROWS)
    own = calls(tmp_path / "0", Cut((20,), 1.0), ROWS)
    wrong = FirstWrong({0: own}, alone, alone).of_rank(0)
    assert wrong is not None
    assert (wrong.name, wrong.what, wrong.input_known) == ("flat", outcome.OUTPUT, False)


def test_samples_that_are_parts_of_several_are_not_placed(tmp_path: Path) -> None:
    """Padding, or the same text twice: which part a rank has is not known."""
    tokens = torch.cat([TOKENS[:1], TOKENS[:1]])
    alone = calls(tmp_path / "alone", Sequence(torch.arange(8)), tokens[:1], tokens[1:])
    own = calls(tmp_path / "0", Sequence(torch.arange(4), torch.zeros(4).long()), tokens[:1, :4])
    found = FirstWrong({0: own}, alone, alone)
    assert not found.share([0])
    assert found.of_rank(0) is None


def test_micro_batches_that_weigh_otherwise_have_their_factors(tmp_path: Path) -> None:
    (found,) = first(tmp_path, calls(tmp_path / "0", Model(), ROWS[:1], ROWS[1:]))
    assert found is not None
    assert found.factors == pytest.approx([4.0, 4 / 3])


def test_samples_that_are_split_along_the_sequence_have_the_same_total() -> None:
    tokens = torch.arange(12).view(2, 6)
    whole = samples.total((tokens,), {})
    parts = [samples.total((part,), {}) for part in tokens.chunk(2, 1)]
    assert sum(parts) % (1 << 64) == whole
    assert samples.total((tokens + 1,), {}) != whole
    mask = torch.ones_like(tokens)
    padded = torch.nn.functional.pad(tokens, (0, 2)), torch.nn.functional.pad(mask, (0, 2))
    assert samples.total((), {"x": padded[0], "attention_mask": padded[1]}) == whole


@pytest.mark.parametrize("by_hand", [False, True])
def test_two_steps_that_are_made_one_are_the_step_of_both_batches(by_hand: bool) -> None:
    """Also where the program scales gradients itself, in each of its steps."""
    hooks, trained = StepHooks(), []
    for merged in (False, True):

        class Own(torch.optim.SGD):
            """A class that torch has not prepared yet."""

            def step(self, closure: object = None) -> None:  # type: ignore[override]
                super().step()

        model = Model()
        if merged:
            MergedSteps(2, hooks).install()
        optimizer = Own(model.parameters(), lr=0.5)
        for rows in (ROWS[:2], ROWS[2:]) if merged else (ROWS,):
            optimizer.zero_grad()
            loss = model(rows).square().mean()
            if by_hand:
                torch.autograd.backward([loss], grad_tensors=[torch.ones(())])
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()  # type: ignore[union-attr]
                for parameter in model.parameters():
                    parameter.grad.mul_(0.05 / norm)  # type: ignore[union-attr]
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        trained.append([p.detach().clone() for p in model.parameters()])
    hooks.remove()
    assert all(torch.allclose(a, b) for a, b in zip(*trained, strict=True))
    assert not torch.equal(trained[0][0], Model().up.weight)


@pytest.mark.parametrize(
    ("own", "right", "apart"),
    [
        ([[1.0, 2.0]], [[1.5, 2.0]], 0.5),
        ([[1.0, 2.0]], [[7.0, 7.0], [1.0, 2.25], [0.0, 2.0]], 0.25),  # the nearest row
        ([[1.0], [4.0]], [[1.0, 9.0], [4.5, 9.0]], 0.5),  # a part of another dim
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0]], None),  # more than there is
        ([[1.0, 2.0]], [[1.0], [2.0]], None),
        ([1.0, 2.0], [[1.0, 2.0]], None),
        ([], [1.0], 0.0),
    ],
)
def test_how_far_a_part_is_from_the_whole(own: Any, right: Any, apart: float | None) -> None:
    assert first_wrong._apart(torch.tensor(own), torch.tensor(right)) == apart


def test_a_gradient_is_named_by_the_module_that_computes_it() -> None:
    def value(what: str, *numbers: float) -> Any:
        return SimpleNamespace(what=what, tensor=torch.tensor(numbers))

    output, given = value("output", 1.0, 2.0), value(first_wrong._OF_GIVEN, 1.0, 2.0)
    other, short = value("output", 1.0, 3.0), value(first_wrong._OF_GIVEN, 1.0)
    for values, at, found in (
        ([output, output, given], 0, given), ([output, other, given], 0, output),
        ([output, short], 0, output), ([given, output, other], 1, output), ([other], 0, other),
    ):  # fmt: skip
        assert first_wrong._named(values, at) is found
