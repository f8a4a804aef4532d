"""Parts that only their bytes locate: each rank's experts as plain tensors."""

from __future__ import annotations

import pytest
import torch

from moediag.ranks.verify import slices
from moediag.ranks.verify.tensor_files import Stored
from moediag.recorder.step.pieces import BOX, FLAT, WHOLE, Where

WHOLE_TENSOR = torch.arange(8.0 * 3 * 4).view(8, 3, 4).cos()


def plain(tensor: torch.Tensor) -> Stored:
    return Stored(Where(WHOLE, tuple(tensor.shape)), tensor)


@pytest.mark.parametrize(("dim", "half"), [(0, 4), (2, 2)])
def test_plain_slices_are_found(dim: int, half: int) -> None:
    first, last = WHOLE_TENSOR.split(half, dim)
    found, reason = slices.located({0: plain(last), 1: plain(first)}, WHOLE_TENSOR)
    assert reason == ""
    assert found is not None
    at = [0, 0, 0]
    assert found[1].where == Where(BOX, (8, 3, 4), tuple(at))
    at[dim] = half
    assert found[0].where == Where(BOX, (8, 3, 4), tuple(at))
    assert torch.equal(found[0].where.cut(WHOLE_TENSOR, tuple(last.shape)), last)


def test_slices_that_a_wrapper_shards_further_are_found() -> None:
    """FSDP1 and FSDP2 over the ranks that have the same experts know only these."""
    experts = WHOLE_TENSOR[4:]
    flat = Stored(Where(FLAT, (4, 3, 4), 20), experts.reshape(-1)[20:])
    box = Stored(Where(BOX, (4, 3, 4), (2, 0, 0)), experts[2:])
    assert slices.places(flat, WHOLE_TENSOR) == [Where(FLAT, (8, 3, 4), 4 * 12 + 20)]
    assert slices.places(box, WHOLE_TENSOR) == [Where(BOX, (8, 3, 4), (6, 0, 0))]


def test_equal_parts_are_ambiguous() -> None:
    whole = torch.zeros(4, 3)
    parts = {0: plain(torch.zeros(2, 3)), 1: plain(torch.zeros(2, 3))}
    assert slices.located(parts, whole) == (None, "")


def test_other_values_have_no_place() -> None:
    found, reason = slices.located({0: plain(WHOLE_TENSOR[:4] + 1)}, WHOLE_TENSOR)
    assert found is None
    assert "what the ranks hold" in reason


def test_experts_that_no_rank_has_are_said() -> None:
    parts = {0: plain(WHOLE_TENSOR[:4]), 1: plain(WHOLE_TENSOR[:4])}
    found, reason = slices.located(parts, WHOLE_TENSOR)
    assert found is None
    assert "is on no rank" in reason


def layers(first: int, count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Layers of a whole model, by their names there."""
    found = {}
    for number in range(first, first + count):
        draw = torch.Generator().manual_seed(seed + number)
        found[f"model.layers.{number}.up.weight"] = torch.randn(4, 4, generator=draw)
        found[f"model.layers.{number}.norm.weight"] = torch.ones(4)
    return found


def counted_from_zero(own: dict[str, torch.Tensor], first: int) -> dict[str, Stored]:
    return {
        slices.shifted(name, {"model.layers.": -first}): plain(tensor)
        for name, tensor in own.items()
    }


def test_layers_that_a_stage_counts_from_zero() -> None:
    whole = {**layers(0, 6), "model.head.weight": torch.ones(3)}
    for first in (2, 3, 4):
        parts = counted_from_zero(layers(first, 2), first)
        assert slices.shifts(parts, whole) == {"model.layers.": first}
        assert {slices.shifted(name, {"model.layers.": first}) for name in parts} <= set(whole)
    half = {name: plain(part.tensor[:2]) for name, part in parts.items()}  # type: ignore[index]
    assert slices.shifts(half, whole) == {"model.layers.": 4}  # tensor parallel, too
    assert slices.shifted("model.head.weight", {"model.layers.": 4}) == "model.head.weight"


def test_experts_that_a_rank_counts_from_zero() -> None:
    experts = {f"layers.{at}.experts.{e}.w": torch.rand(3, 3) for at in range(2) for e in range(4)}
    parts = {
        f"layers.{at}.experts.{e}.w": plain(experts[f"layers.{at}.experts.{e + 2}.w"])
        for at in range(2) for e in range(2)
    }  # fmt: skip
    expected = {"layers.0.experts.": 2, "layers.1.experts.": 2}
    assert slices.shifts(parts, experts) == expected


@pytest.mark.parametrize("other", ["same", "unknown", "constant"])
def test_layers_that_stay_where_they_are(other: str) -> None:
    """They have their numbers, have other values, or may be several ones."""
    own = layers(0, 2, seed=90 if other == "unknown" else 0)
    if other == "constant":
        own = {name: tensor for name, tensor in own.items() if "norm" in name}
    assert slices.shifts({name: plain(t) for name, t in own.items()}, layers(0, 6)) == {}
