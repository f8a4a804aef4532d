"""Fingerprints: equal for equal bytes, different for others, exact for every kind of tensor."""

from __future__ import annotations

import pytest
import torch

from moediag.recorder.step.numbers import (
    Fingerprints,
    digest,
    part_fingerprint,
    projected,
    row_fingerprints,
)


def of(*tensors: torch.Tensor) -> list[str | None]:
    prints = Fingerprints()
    for tensor in tensors:
        prints.add(tensor)
    return prints.read()


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn,
     torch.complex64],
)  # fmt: skip
def test_one_changed_element_changes_it(dtype: torch.dtype) -> None:
    values = torch.arange(24).reshape(4, 6).to(torch.float32).to(dtype)
    changed = values.clone()
    changed[2, 3] = torch.tensor(99.0).to(dtype)
    same, again, different = of(values, values.clone(), changed)
    assert same == again != different


def test_the_order_of_elements_and_the_number_of_zeros_count() -> None:
    values = torch.randn(50)
    found = of(values, values.flip(0), torch.zeros(3), torch.zeros(4), torch.zeros(0))
    assert len(set(found)) == 5


def test_a_view_has_the_fingerprint_of_its_elements() -> None:
    values = torch.randn(6, 8)
    one, other = of(values.t()[1:5], values.t()[1:5].contiguous())
    assert one == other


@pytest.mark.parametrize("begin", [0, 1, 2, 3])
def test_where_a_tensor_begins_in_memory_does_not_count(begin: int) -> None:
    values = torch.randn(9).bfloat16()
    memory = torch.cat([torch.zeros(begin).bfloat16(), values])
    moved = memory.clone()
    moved[-1] += 1  # in the last word, which the elements do not fill
    same, again, different = of(values, memory[begin:], moved[begin:])
    assert same == again != different


def test_large_tensors_are_read_to_their_end() -> None:
    values = torch.zeros(3 * (1 << 16) + 5, dtype=torch.float64)
    found = of(values)
    for at in (0, 1 << 16, 2 * (1 << 16) + 1, len(values) - 1):
        changed = values.clone()
        changed[at] = 1.0
        found += of(changed)
    moved = values.clone()
    moved[7], moved[(1 << 16) + 7] = 1.0, 0.0
    assert len(set(found)) == 5


def test_signed_zero_is_another_value() -> None:
    assert len(set(of(torch.tensor([0.0]), torch.tensor([-0.0])))) == 2


def test_parts_add_up_to_the_whole_however_it_is_cut() -> None:
    whole = torch.randn(6, 4)
    places = torch.arange(24).view(6, 4)

    def total(*cuts: tuple[slice, slice]) -> int:
        parts = [part_fingerprint(whole[cut], places[cut])[0] for cut in cuts]
        return sum(int(part, 16) for part in parts) % 2**64

    every = slice(None)
    rows = [(slice(0, 1), every), (slice(1, 6), every)]
    columns = [(every, slice(0, 3)), (every, slice(3, 4))]
    assert total((every, every)) == total(*rows) == total(*columns)
    whole[[0, 5]] = whole[[5, 0]]
    assert total((every, every)) != part_fingerprint(whole.flip(0), places)[0]


def test_what_has_no_bytes_in_order_is_unknown() -> None:
    sparse = torch.eye(3).to_sparse()
    assert of(torch.empty(3, device="meta"), sparse) == [None, None]


def test_a_tensor_whose_storage_was_freed_is_not_read() -> None:
    """As FSDP2 does with a gathered parameter; reading it would crash the process."""
    gathered = torch.ones(4, 3)
    gathered.untyped_storage().resize_(0)
    assert of(gathered) == [None]
    assert part_fingerprint(gathered, torch.arange(12)) == ("", "")
    assert row_fingerprints(gathered, 8) == []


def test_an_element_that_is_not_finite_is_seen() -> None:
    prints = Fingerprints()
    for tensor in (torch.ones(3), torch.tensor([1.0, float("nan")]), torch.ones(2, dtype=int)):
        prints.add_finite(tensor)
    assert prints.read() == ["1", "0", None]


def test_a_sketch_shows_how_much_tensors_differ() -> None:
    torch.manual_seed(0)
    values = torch.randn(70_000)
    prints = Fingerprints()
    for at, tensor in enumerate((values, values * (1 + 1e-6), torch.randn(70_000))):
        prints.add_sketch(at, tensor)
    (total, norm), (near, _), (far, _) = prints.sketches().values()
    assert norm == pytest.approx(float(values.double().norm()))
    assert abs(near - total) < 1e-4 * norm < 0.05 * norm < abs(far - total)


def test_numbers_of_older_evidence_are_still_computed() -> None:
    batch = {"ids": torch.arange(4), "rest": [torch.tensor(2.0), 1.5, "x", None]}
    assert digest(batch) == "5144cd717992d2dcfb9bd7a082f0b38d"
    assert digest(torch.tensor([0, 1]), size=8) == "093a22114a9d0ad9"
    norm, projections = projected(torch.arange(1.0, 5.0))
    assert norm == 5.47722558
    assert projections[:6] == [6.0, 0.0, -8.0, -8.0, -6.0, 0.0]


@pytest.mark.parametrize(
    "other", [torch.zeros(2, 3), torch.zeros(6, dtype=torch.int32), torch.ones(6)]
)
def test_a_digest_tells_shape_dtype_and_bytes_apart(other: torch.Tensor) -> None:
    assert digest(torch.zeros(6)) == digest(torch.zeros(6))
    assert digest(torch.zeros(6)) != digest(other)
