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
