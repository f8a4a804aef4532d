"""Which elements a rank holds, compared with those of fully_shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step import pieces
from tests.unit.sharded import fully_sharded, numbered, placed, rank_of


def same(found: Any, parameter: Any) -> bool:
    local = pieces.local(parameter)
    return found.shape == local.shape and torch.equal(found.float(), local)


def test_a_plain_tensor_has_no_placement() -> None:
    plain = torch.nn.Parameter(numbered(4, 2))
    assert pieces.index(plain) is None
    assert not pieces.distributed(plain)
    assert pieces.local(plain).requires_grad is False
    assert pieces.placement(plain) == ""


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("shape", [(8, 4), (5, 6), (3, 4), (7, 3), (9,), (6, 2, 3)])
def test_index_of_an_fsdp_shard_is_correct(rank: int, shape: tuple[int, ...]) -> None:
    with rank_of(rank, 4) as mesh:
        parameter = fully_sharded(numbered(*shape), mesh)
        assert same(pieces.index(parameter), parameter)
        local = tuple(pieces.local(parameter).shape)
        assert same(pieces.where(parameter).positions(local), parameter)


def test_five_rows_are_sharded_over_four_ranks() -> None:
    held = []
    for rank in range(4):
        with rank_of(rank, 4) as mesh:
            held.append(pieces.index(fully_sharded(numbered(5, 1), mesh)).reshape(-1).tolist())
    assert held == [[0, 1], [2, 3], [4], []]


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(8, 4), (5, 6), (7, 3), (2, 4)])
def test_index_of_a_nested_shard_is_correct(rank: int, dim: int, shape: tuple[int, ...]) -> None:
    """FSDP over tensor-parallel parameters; on the same dim the pieces are strided."""
    with rank_of(rank, 2, 2) as mesh:
        outer, inner = (mesh[name] for name in mesh.mesh_dim_names)
        parameter = fully_sharded(placed(numbered(*shape), inner, Shard(dim)), outer)
        assert type(parameter.placements[0]).__name__ == ("_StridedShard", "Shard")[dim]
        assert same(pieces.index(parameter), parameter)


def test_strided_shards_cover_every_element_once() -> None:
    found = []
    for rank in range(4):
        with rank_of(rank, 2, 2) as mesh:
            outer, inner = (mesh[name] for name in mesh.mesh_dim_names)
            parameter = fully_sharded(placed(numbered(8, 1), inner, Shard(0)), outer)
            found.append(pieces.index(parameter).reshape(-1).tolist())
    assert found == [[0, 1], [4, 5], [2, 3], [6, 7]]


@pytest.mark.parametrize("rank", [0, 3])
def test_replicated_and_partial_tensors_are_whole_on_every_rank(rank: int) -> None:
    with rank_of(rank, 2, 2) as mesh:
        whole = numbered(4, 4)
        copy = placed(whole, mesh, Replicate(), Replicate())
        assert torch.equal(pieces.index(copy), whole.long())
        part = DTensor.from_local(whole, mesh, [Partial(), Replicate()], run_check=False)
        assert torch.equal(pieces.index(part), whole.long())
        half = placed(whole, mesh, Replicate(), Shard(0))
        assert same(pieces.index(half), half)


@pytest.mark.parametrize("rank", range(4))
def test_index_is_equal_without_src_data_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import tensor

    def older(whole: Any, mesh: Any, placements: Any) -> Any:
        raise AssertionError("it would broadcast")

    with rank_of(rank, 2, 2) as mesh:
        layouts = ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)])
        cases = [placed(numbered(5, 6), mesh, *layout) for layout in layouts]
        outer, inner = (mesh[name] for name in mesh.mesh_dim_names)
        strided = fully_sharded(placed(numbered(8, 4), inner, Shard(0)), outer)
        expected = [pieces.index(case) for case in cases]
        monkeypatch.setattr(tensor, "distribute_tensor", older)
        for case, whole in zip(cases, expected, strict=True):
            assert torch.equal(pieces.index(case), whole)
        with pytest.raises(NotApplicable, match="cannot tell where a strided shard lies"):
            pieces.index(strided)


def test_placements_are_described() -> None:
    with rank_of(0, 2, 2) as mesh:
        outer, inner = mesh.mesh_dim_names
        both = placed(numbered(4, 4), mesh, Shard(0), Replicate())
        assert pieces.placement(both) == f"Shard(0) on {outer}[2] x Replicate on {inner}[2]"
        strided = fully_sharded(placed(numbered(8, 4), mesh[inner], Shard(0)), mesh[outer])
        words = f"StridedShard(0) on {outer}[2] x Shard(0) on {inner}[2]"
        assert pieces.placement(strided) == words
    with rank_of(0, 2, 1) as mesh:
        outer, _ = mesh.mesh_dim_names
        alone = placed(numbered(4, 4), mesh, Shard(0), Shard(1))
        assert pieces.placement(alone) == f"Shard(0) on {outer}[2]", "one rank divides nothing"


def test_a_plain_slice_is_selected_by_its_position() -> None:
    whole = numbered(4, 6)
    assert torch.equal(pieces.plain_piece(whole, (2, 6), 1), whole[2:])
    assert torch.equal(pieces.plain_piece(whole, (4, 3), 0), whole[:, :3])
    assert torch.equal(pieces.plain_piece(whole, (4, 3), 1), whole[:, 3:])
    # No slice: another position, other shapes, no position.
    for shape, at in (((2, 6), 2), ((2, 3), 0), ((2, 6), None), ((6,), 0), ((8, 6), 0)):
        assert pieces.plain_piece(whole, shape, at) is whole


def test_the_axes_of_a_dtensor_tell_what_each_does() -> None:
    assert pieces.axes_of(numbered(4, 2)) == ()
    with rank_of(1, 2, 2) as mesh:
        outer, inner = (mesh[name] for name in mesh.mesh_dim_names)
        strided = fully_sharded(placed(numbered(8, 4), inner, Shard(0)), outer)
        summed = DTensor.from_local(numbered(4), mesh, [Partial(), Replicate()], run_check=False)
        assert [(a.name, a.size, a.at, a.dim, a.strided) for a in pieces.axes_of(strided)] == [
            (mesh.mesh_dim_names[0], 2, 0, 0, True),
            (mesh.mesh_dim_names[1], 2, 1, 0, False),
        ]
        assert [axis.dim for axis in pieces.axes_of(summed)] == [None, None]
        assert pieces.axes_of(placed(numbered(4, 4), mesh, Replicate(), Shard(-1)))[1].dim == 1


def test_ranks_with_the_same_part_are_those_along_the_other_axes() -> None:
    with rank_of(3, 2, 2) as mesh:
        half = placed(numbered(4, 4), mesh, Replicate(), Shard(0))
        assert pieces.same_part(mesh, pieces.axes_of(half)) == ("S(0)=1/2", (1, 3))
        part, alone = pieces.same_part(mesh, pieces.axes_on(mesh, (Partial(), Shard(1)), 2))
        assert (part, alone) == ("P(sum)=1/2 S(1)=1/2", (3,))


def test_a_local_tensor_is_read_by_no_operation_and_shares_memory() -> None:
    with rank_of(0, 2) as mesh:
        parameter = fully_sharded(numbered(4, 2), mesh)
        assert pieces.held(parameter) is parameter._local_tensor
        pieces.local(parameter).zero_()
        assert not parameter._local_tensor.any()
    plain = torch.nn.Parameter(numbered(2))
    assert pieces.held(plain) is plain
