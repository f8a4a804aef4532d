"""What the ranks of a program bring together for one process: batches and optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moediag.ranks.verify import optimizer_copies, whole_batch
from moediag.recorder.not_applicable import NotApplicable


def together(folder: Path, *batches: Any, collate: whole_batch.Collate | None = None) -> Any:
    hashes = {rank: whole_batch.write(folder, rank, one) for rank, one in enumerate(batches)}
    return whole_batch.read(folder, hashes, collate)


def rows(*values: int) -> dict[str, Any]:
    return {"x": [torch.tensor(values)], "k": 2}


def test_batches_are_concatenated_and_equal_ones_count_once(tmp_path: Path) -> None:
    found = together(tmp_path, rows(1, 2), rows(3, 4), rows(1, 2), rows(3, 4))
    assert found["x"][0].tolist() == [1, 2, 3, 4]
    assert found["k"] == 2


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ((rows(1), rows(1), rows(2)), "some ranks have the same batch and others do not"),
        (({"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}), "give collate="),
        (({"x": torch.tensor(1)}, {"x": torch.tensor(2)}), "different numbers"),
        (({"x": torch.ones(1)}, {"y": torch.ones(1)}), "different keys"),
        (({"x": torch.ones(1), "k": 1}, {"x": torch.ones(1), "k": 2}), "different values"),
    ],
)
def test_batches_that_do_not_fit_are_said(
    tmp_path: Path, batches: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(NotApplicable, match=words):
        together(tmp_path, *batches)


def test_the_program_can_put_its_batches_together(tmp_path: Path) -> None:
    def collate(batches: list[Any]) -> Any:
        return torch.cat([one["x"][:, :3] for one in batches])

    found = together(tmp_path, {"x": torch.ones(2, 3)}, {"x": torch.zeros(1, 4)}, collate=collate)
    assert found.shape == (3, 3)


def test_the_settings_are_those_of_most_ranks() -> None:
    usual, other = {"w": {"lr": 0.1, "decay": 0.0}}, {"w": {"lr": 0.2, "decay": 0.0}}
    assert optimizer_copies.agreed([usual, other, usual]) == (usual, "")
    found, differ = optimizer_copies.agreed([usual, other])
    assert (found, differ) == ({}, "lr of w is 0.1 and 0.2")
    local = {"expert": {"lr": 0.3, "decay": 0.0}}  # which only one rank has
    assert optimizer_copies.agreed([usual, {**usual, **local}]) == ({**usual, **local}, "")
