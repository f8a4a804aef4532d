"""`verify.step` inside a program, in one process: the model that trains and its reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moediag import verify
from moediag.launch import comparing
from moediag.pipeline import verify as verifier
from moediag.ranks.verify import comparison, in_program

LEFT = torch.arange(24.0).view(8, 3).sin()


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.tanh(self.up(x))))  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


@pytest.fixture(autouse=True)
def _compared_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares in this process instead of a new one."""

    def compare(python: str, target: Path, job: Path, references: Sequence[Path]) -> str:
        comparison.compare(job, list(references), target)
        return ""

    monkeypatch.setattr(comparing, "compare", compare)


BATCH = {"x": LEFT, "y": LEFT[:, :2].cos()}


def trained(steps: int = 2, kind: Any = torch.optim.AdamW, **model: float) -> tuple[Model, Any]:
    """A model in the middle of its training: its optimizer has a state."""
    torch.manual_seed(1)
    one = Model(**model)
    optimizer = kind(one.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(one, BATCH).backward()
        optimizer.step()
    optimizer.zero_grad()
    return one, optimizer


def checked(
    folder: Path, body: Callable[[Model, Any], None], given: Any = None, **options: Any
) -> verify.Checked:
    model, optimizer = given or trained()
    asked = {"reference": Model, "loss": loss, "batch": BATCH, "out": folder / "run", **options}
    with verify.step(model, optimizer, **asked) as found:
        body(model, optimizer)
    return found


def right(model: Model, optimizer: Any) -> None:
    for rows in (slice(0, 4), slice(4, 8)):
        part = {name: tensor[rows] for name, tensor in BATCH.items()}
        (loss(model, part) / 2).backward()
    optimizer.step()


def test_a_right_step_is_clean_and_nothing_of_it_stays(tmp_path: Path) -> None:
    given = trained()
    before = (nn.Module.__call__, torch.Tensor.backward, torch.get_rng_state())
    found = checked(tmp_path, right, given)
    assert (found.verdict, found.ok) == ("clean", True), found.cause
    assert not any("weights" in text for text in found.not_compared)
    after = (nn.Module.__call__, torch.Tensor.backward, torch.get_rng_state())
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    assert (tmp_path / "run" / "result.json").is_file()


def test_accumulation_that_divides_twice_is_found(tmp_path: Path) -> None:
    def body(model: Model, optimizer: Any) -> None:
        for rows in (slice(0, 4), slice(4, 8)):
            part = {name: tensor[rows] for name, tensor in BATCH.items()}
            (loss(model, part) / 4).backward()
        optimizer.step()

    found = checked(tmp_path, body)
    assert found.verdict == "wrong-gradients"
    assert "0.500 times the reference" in found.cause
    assert "the number of micro-batches" in found.cause


def test_a_forgotten_state_of_the_optimizer_shows_in_the_weights(tmp_path: Path) -> None:
    """The reference continues with the state that the optimizer had before the step."""

    def body(model: Model, optimizer: Any) -> None:
        optimizer.state.clear()
        loss(model, BATCH).backward()
        optimizer.step()

    found = checked(tmp_path, body, trained(steps=5))
    assert found.verdict == "wrong-weights", found.cause


def test_a_clipped_step_is_compared_with_a_clipped_one(tmp_path: Path) -> None:
    def body(model: Model, optimizer: Any) -> None:
        loss(model, BATCH).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    sgd = trained(kind=torch.optim.SGD)
    assert checked(tmp_path, body, sgd, clip=1e-3).verdict == "clean"
    found = checked(tmp_path / "without", body, trained(kind=torch.optim.SGD))
    assert found.verdict == "clean"
    assert any("clips gradients and the reference does not" in t for t in found.not_compared)


def test_an_optimizer_of_ones_own_leaves_the_weights_out(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        pass

    found = checked(tmp_path, right, trained(kind=Own))
    assert found.verdict == "clean"
    assert any("Own is not an optimizer of torch.optim" in text for text in found.not_compared)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": {"x": LEFT[:4], "y": LEFT[:4, :2]}}, "different samples"),
        ({"batch": {"x": object()}}, "the batch has a object"),
        ({"reference": lambda: nn.Linear(3, 2)}, "the distributed run has no such tensor"),
        ({"loss": lambda model, batch: model(batch["z"])}, "the reference failed: keyerror('z')"),
    ],
)
def test_what_cannot_be_compared_is_inconclusive(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    found = checked(tmp_path, right, **options)
    assert found.verdict == "inconclusive"
    assert words in found.cause.lower()


def test_dropout_is_inconclusive(tmp_path: Path) -> None:
    given = trained(steps=0, dropout=0.5)
    found = checked(tmp_path, right, given, reference=lambda: Model(0.5))
    assert (found.verdict, "random numbers" in found.cause) == ("inconclusive", True)


def test_a_body_without_a_step_is_inconclusive(tmp_path: Path) -> None:
    found = checked(tmp_path, lambda model, optimizer: loss(model, BATCH).backward())
    assert (found.verdict, "made a step" in found.cause) == ("inconclusive", True)


def test_an_exception_of_the_body_is_its_own(tmp_path: Path) -> None:
    before = nn.Module.__call__

    def body(model: Model, optimizer: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        checked(tmp_path, body)
    assert nn.Module.__call__ is before
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_result_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "conclude", full_disk)
    with pytest.raises(OSError, match="No space left"):
        checked(tmp_path, right)


def full_disk(*_: object) -> Any:
    raise OSError(28, "No space left on device")


class TwoRanks:
    """Two ranks in this process. While rank 1 sleeps, rank 0 works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
        self.rank, self._work = 1, work
        self.ends: list[str] = []
        store = torch.distributed.HashStore()
        monkeypatch.setattr(in_program, "_distributed", lambda: True)
        monkeypatch.setattr(in_program, "own_rank", lambda: self.rank)
        monkeypatch.setattr(in_program, "world", lambda: 1)  # rank 0 waits for no readers
        monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(in_program.time, "sleep", lambda _: self.run(0))

    def run(self, rank: int) -> None:
        before, self.rank = self.rank, rank
        try:
            in_program.on_rank_zero(self._work, "a-folder")
            self.ends.append(f"rank {rank}: returned")
        except BaseException as error:
            self.ends.append(f"rank {rank}: {error!r}")
        self.rank = before


class Unreadable(Exception):
    """Cannot be built from its arguments as pickle does it."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def test_ranks_return_after_rank_0_has_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    ranks = TwoRanks(monkeypatch, lambda: calls.append(ranks.rank))
    ranks.run(1)
    assert ranks.ends == ["rank 0: returned", "rank 1: returned"]
    assert calls == [0]


def test_rank_0_keeps_the_store_until_the_others_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun the store ends with rank 0."""
    ranks = TwoRanks(monkeypatch, lambda: None)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        ranks.run(1)

    monkeypatch.setattr(in_program, "world", lambda: 2)
    monkeypatch.setattr(in_program.time, "sleep", sleep)
    ranks.run(0)
    assert ranks.ends == ["rank 1: returned", "rank 0: returned"]
    assert len(waited) == 1


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (OSError(28, "No space left"), "OSError(28, 'No space left')"),
        (KeyboardInterrupt(), "KeyboardInterrupt()"),
        (Unreadable(1, 2), "RuntimeError(\"Unreadable('1 and 2')\")"),
    ],
)
def test_every_rank_ends_with_the_error_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, elsewhere: str
) -> None:
    def work() -> None:
        raise error

    ranks = TwoRanks(monkeypatch, work)
    ranks.run(1)
    assert ranks.ends == [f"rank 0: {error!r}", f"rank 1: {elsewhere}"]


def test_clipping_by_hand_is_clean_and_clipping_too_far_is_not(tmp_path: Path) -> None:
    for limit, verdict in ((1e-3, "clean"), (5e-4, "wrong-gradients")):

        def body(model: Model, optimizer: Any, limit: float = limit) -> None:
            loss(model, BATCH).backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()  # type: ignore[union-attr]
            for p in model.parameters():
                p.grad.mul_(min(limit / norm, 1))  # type: ignore[union-attr]
            optimizer.step()

        found = checked(tmp_path / verdict, body, clip=1e-3)
        assert found.verdict == verdict, found.cause


def test_a_model_that_is_not_called_is_said(tmp_path: Path) -> None:
    other = Model()

    def body(model: Model, optimizer: Any) -> None:
        loss(other, BATCH).backward()
        optimizer.step()

    found = checked(tmp_path, body)
    assert found.verdict == "inconclusive"
    assert "no call of the model was seen" in found.cause.lower()


def test_the_first_module_with_a_wrong_output_is_named(tmp_path: Path) -> None:
    def body(model: Model, optimizer: Any) -> None:
        model.dropout.register_forward_hook(lambda _module, _given, result: result * 1.5)
        loss(model, BATCH).backward()
        optimizer.step()

    found = checked(tmp_path, body)
    assert found.verdict == "wrong-gradients"
    assert found.cause.startswith("The first wrong output is that of dropout (Dropout), called at ")
    assert "Compare what test_verify_step.py:" in found.next_step
